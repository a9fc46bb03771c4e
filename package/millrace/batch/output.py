"""The file of answers, which a later run continues."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from millrace.errors import OutputError

BEGINNING = b'{"id":"batch_req_'
"""Of every line."""


class Output:
    """Appends whole lines. An unfinished last line of an earlier run is cut, and its request asked again."""

    def __init__(self, path: Path) -> None:
        """Read what is there. Raises OSError, and OutputError for a file of something else, which stays as it is."""
        self._file = path.open("a+b")
        self._file.seek(0)
        self.custom_ids: set[str] = set()
        """The `custom_id`s of the answered requests."""
        self.bad_lines: set[int] = set()
        """Numbers of input lines that have their error."""
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                if not BEGINNING.startswith(line[: len(BEGINNING)]):
                    raise _no_answers(path)
                break
            end += len(line)
            if not self._remember(line):
                raise _no_answers(path)
        self._file.truncate(end)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, answer: Mapping[str, Any]) -> None:
        """Append one line, which is with the system when this returns. Raises OSError."""
        self._file.write(orjson.dumps(answer) + b"\n")
        self._file.flush()

    def _remember(self, line: bytes) -> bool:
        """Whether the line is one of answers or errors."""
        try:
            value = orjson.loads(line)
        except ValueError:
            return False
        if not (isinstance(value, dict) and {"custom_id", "response", "error"} <= value.keys()):
            return False
        error = value["error"]
        if isinstance(error, dict) and isinstance(error.get("line"), int):
            self.bad_lines.add(error["line"])
        elif isinstance(value["custom_id"], str):
            self.custom_ids.add(value["custom_id"])
        return True


def _no_answers(path: Path) -> OutputError:
    return OutputError(f"{path} has a line that is no answer of a batch: name another file")
