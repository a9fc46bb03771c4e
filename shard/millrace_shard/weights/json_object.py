"""Reads a JSON object from a file next to the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from millrace_shard.errors import ModelError


def read_json_object(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None if the file does not exist. Raises ModelError, naming the file."""
    try:
        value = parse_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def parse_json(text: bytes) -> Any:  # noqa: ANN401
    """The value of a JSON text. Raises ValueError, also for one with too many levels."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it has too many levels") from error
