"""The files of this checkout that people write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MADE_BY_PROGRAMS = {"__pycache__", "node_modules", "build", "dist", "bench/out", "bench/models"}
GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def project_files() -> Iterator[str]:
    """Paths below the root of the checkout; neither hidden files nor what programs made."""
    for folder, subfolders, names in os.walk(ROOT):
        place = Path(folder).relative_to(ROOT)
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith(".") and not {name, str(place / name)} & MADE_BY_PROGRAMS
        ]
        for name in names:
            if not name.startswith(".") and not name.endswith(GENERATED):
                yield str(place / name)
