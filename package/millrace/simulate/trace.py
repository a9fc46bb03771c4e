"""Requests from a file: rows of a CSV with a header, or JSON objects, with the fields of `Arrival`."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from millrace.simulate.simulated_request import Arrival

Row = Mapping[str, Any]
Field = tuple[Callable[[Any], Any], Callable[[Any], bool], str]
"""The conversion of a value, the check of the result, and the words for a valid value."""


class TraceError(Exception):
    """A trace is invalid; the message names file and line."""


def read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the number of each line and its fields; empty fields and null are left out.

    Raises:
        TraceError: a line is not a row, or the file is of another kind.
        OSError, UnicodeDecodeError, csv.Error: the file cannot be read.

    """
    readers = {".csv": _csv_rows, ".jsonl": _json_rows, ".ndjson": _json_rows}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise TraceError(f"{path}: a trace is a .csv or a .jsonl file")
    return reader(path)


def _csv_rows(path: Path) -> Iterator[tuple[int, Row]]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        for row in reader:
            if None in row or None in row.values():
                raise TraceError(f"{path}:{reader.line_num}: not as many fields as the header has")
            yield reader.line_num, {name: text for name, text in row.items() if text != ""}


def _json_rows(path: Path) -> Iterator[tuple[int, Row]]:
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


def values_of(
    row: Row, fields: Mapping[str, Field], required: tuple[str, ...], where: str
) -> dict[str, Any]:
    """The converted values of a row; raises TraceError at `where` if it has others, lacks some or one is invalid."""
    for name in row:
        if name not in fields:
            raise TraceError(f"{where}: unknown field {name!r}; there are {', '.join(fields)}")
    values: dict[str, Any] = {}
    for name in fields:
        if name in row:
            values[name] = _value(name, row[name], fields[name], where)
        elif name in required:
            raise TraceError(f"{where}: {name} is missing")
    return values


def _value(name: str, raw: object, field: Field, where: str) -> object:
    convert, is_valid, meaning = field
    try:
        value = convert(raw)
        if is_valid(value):
            return value
    except (TypeError, ValueError, OverflowError):
        pass
    raise TraceError(f"{where}: {name} is {_short(raw)}, not {meaning}")


def _short(raw: object) -> str:
    text = repr(raw)
    return text if len(text) <= 60 else f"{text[:57]}..."


def to_integer(raw: object) -> int:
    """A whole number; raises TypeError or ValueError for other values."""
    if isinstance(raw, bool) or (isinstance(raw, float) and not raw.is_integer()):
        raise TypeError("no integer")
    return int(raw)  # type: ignore[call-overload, no-any-return]


def to_number(raw: object) -> float:
    """A number; raises TypeError or ValueError for other values."""
    if isinstance(raw, bool):
        raise TypeError("no number")
    return float(raw)  # type: ignore[arg-type]


TIME: Field = (to_number, lambda value: 0.0 <= value < math.inf, "a number of seconds")
COUNT: Field = (to_integer, lambda value: value >= 1, "a number of tokens, 1 or more")
NAME: Field = (str, lambda _: True, "a name")

REQUIRED = ("arrived_at", "prompt_tokens", "output_tokens")
FIELDS: Mapping[str, Field] = {
    "arrived_at": TIME,
    "prompt_tokens": COUNT,
    "output_tokens": COUNT,
    "max_new_tokens": COUNT,
    "group": NAME,
    "prefix_tokens": (to_integer, lambda value: value >= 0, "a number of tokens"),
    "priority": (to_integer, lambda value: -10 <= value <= 10, "an integer from -10 to 10"),
    "tenant": NAME,
    "max_queue_seconds": TIME,
    "adapter": NAME,
    "adapter_pages": (to_integer, lambda value: value >= 0, "a number of pages"),
}


def read_trace(path: Path) -> Iterator[Arrival]:
    """Yield the requests of a `.csv` or `.jsonl` file.

    Raises:
        TraceError: a line is not a request, or arrives before the line above it.

    """
    return in_order(path, own_arrival)


def in_order(path: Path, arrival_of: Callable[[Row, str], Arrival]) -> Iterator[Arrival]:
    """Yield the requests that `arrival_of` makes of the lines and their names.

    Raises:
        TraceError: a line is not a request, or arrives before the line above it.

    """
    last = 0.0
    try:
        for number, row in read_rows(path):
            arrival = arrival_of(row, f"{path}:{number}")
            if arrival.arrived_at < last:
                raise TraceError(f"{path}:{number}: arrives before the request above it")
            last = arrival.arrived_at
            yield arrival
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: {error}") from error


def own_arrival(row: Row, where: str) -> Arrival:
    """The request of a line, which is named `where`; raises TraceError."""
    values = values_of(row, FIELDS, REQUIRED, where)
    if values.get("prefix_tokens", 0) and not values.get("group"):
        raise TraceError(f"{where}: prefix_tokens without a group to share them with")
    return Arrival(**values)
