"""Workloads recorded in files: one request a line, as CSV with a header or as JSON objects."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from millrace_router.simulator.simulated_request import Arrival

REQUIRED = ("arrived_at", "prompt_tokens", "output_tokens")


class TraceError(Exception):
    """A trace is invalid; the message names file and line."""


def read_trace(path: Path) -> Iterator[Arrival]:
    """Yield the requests of a `.csv` or `.jsonl` file, whose fields are those of `Arrival`.

    Raises:
        TraceError: a line is no request, or arrives before the line above it.

    """
    readers = {".csv": _csv_rows, ".jsonl": _json_rows, ".ndjson": _json_rows}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise TraceError(f"{path}: a trace is a .csv or a .jsonl file")
    last = 0.0
    try:
        for number, row in reader(path):
            arrival = _arrival(row, f"{path}:{number}")
            if arrival.arrived_at < last:
                raise TraceError(f"{path}:{number}: arrives before the request above it")
            last = arrival.arrived_at
            yield arrival
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: {error}") from error


def _csv_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        for row in reader:
            if None in row or None in row.values():
                raise TraceError(f"{path}:{reader.line_num}: not as many fields as the header has")
            yield reader.line_num, {name: text for name, text in row.items() if text != ""}


def _json_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise TraceError(f"{path}:{number}: {error}") from error
            if not isinstance(row, dict):
                raise TraceError(f"{path}:{number}: not a JSON object")
            yield number, {name: value for name, value in row.items() if value is not None}


def _arrival(row: Mapping[str, Any], where: str) -> Arrival:
    for name in row:
        if name not in Arrival._fields:
            known = ", ".join(Arrival._fields)
            raise TraceError(f"{where}: unknown field {name!r}; there are {known}")
    values: dict[str, Any] = {}
    for name in Arrival._fields:
        if name in row:
            values[name] = _value(name, row[name], where)
        elif name in REQUIRED:
            raise TraceError(f"{where}: {name} is missing")
    if values.get("prefix_tokens", 0) and not values.get("group"):
        raise TraceError(f"{where}: prefix_tokens without a group to share them with")
    return Arrival(**values)


def _value(name: str, given: object, where: str) -> object:
    convert, is_valid, meaning = _FIELDS[name]
    try:
        value = convert(given)
        if is_valid(value):
            return value
    except (TypeError, ValueError, OverflowError):
        pass
    raise TraceError(f"{where}: {name} is {given!r}, not {meaning}")


def _integer(given: object) -> int:
    if isinstance(given, bool) or (isinstance(given, float) and not given.is_integer()):
        raise TypeError("no integer")
    return int(given)  # type: ignore[call-overload, no-any-return]


def _seconds(given: object) -> float:
    if isinstance(given, bool):
        raise TypeError("no number")
    return float(given)  # type: ignore[arg-type]


_TIME = (_seconds, lambda value: 0.0 <= value < math.inf, "a number of seconds")
_COUNT = (_integer, lambda value: value >= 1, "a number of tokens, 1 or more")
_NAME = (str, lambda _: True, "a name")
_FIELDS: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], bool], str]] = {
    "arrived_at": _TIME,
    "prompt_tokens": _COUNT,
    "output_tokens": _COUNT,
    "max_new_tokens": _COUNT,
    "group": _NAME,
    "prefix_tokens": (_integer, lambda value: value >= 0, "a number of tokens"),
    "priority": (_integer, lambda value: -10 <= value <= 10, "an integer from -10 to 10"),
    "tenant": _NAME,
    "max_queue_seconds": _TIME,
    "adapter": _NAME,
    "adapter_pages": (_integer, lambda value: value >= 0, "a number of pages"),
}
