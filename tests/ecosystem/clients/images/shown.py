"""Pictures that the test has drawn, each in a file with the name of its text."""

from __future__ import annotations

import base64
import os
from pathlib import Path

MODEL = "reader"


def shown() -> dict[str, bytes]:
    """The bytes of each picture by its text."""
    files = sorted(Path(os.environ["PICTURES"]).glob("*.png"))
    assert len(files) >= 4
    return {file.stem: file.read_bytes() for file in files}


def base64_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


def url_of(content: bytes) -> str:
    return f"data:image/png;base64,{base64_of(content)}"
