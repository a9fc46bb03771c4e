"""Reads a JSON object from a file next to the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from millrace_proto.small_files import read_small_file
from millrace_shard.errors import ModelError


def read_json_object(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None if the file does not exist. Raises ModelError, naming the file."""
    try:
        value = parse_json_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def parse_json_file(path: Path) -> Any:  # noqa: ANN401
    """The value in a file of JSON. Raises ValueError, or OSError also for a pipe, a device or a large file."""
    return parse_json(read_small_file(path))


def parse_json(text: bytes) -> Any:  # noqa: ANN401
    """The value of a JSON text. Raises ValueError, also for one with too many levels."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it has too many levels") from error
