"""Reads a trace in the form that its first line has."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

from millrace_router.simulator.simulated_request import Arrival
from millrace_router.simulator.traces.lines import Row, TraceError, read_rows
from millrace_router.simulator.traces.own import own_arrival
from millrace_router.simulator.traces.published import (
    azure_arrival,
    mooncake_arrival,
    qwen_arrival,
)

Form = Callable[[Row, str], Arrival]


def read_trace(path: Path) -> Iterator[Arrival]:
    """Yield the requests of a `.csv` or `.jsonl` file.

    The times of an Azure trace, which are dates, are counted from its first request.

    Raises:
        TraceError: a line is no request, or arrives before the line above it.

    """
    form: Form | None = None
    first = last = 0.0
    try:
        for number, row in read_rows(path):
            if form is None:
                form = _form(row)
                first = last = form(row, f"{path}:{number}").arrived_at
                first = first if form is azure_arrival else 0.0
            arrival = form(row, f"{path}:{number}")
            if arrival.arrived_at < last:
                raise TraceError(f"{path}:{number}: arrives before the request above it")
            last = arrival.arrived_at
            yield arrival._replace(arrived_at=last - first) if first else arrival
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: {error}") from error


def _form(row: Row) -> Form:
    if "TIMESTAMP" in row:
        return azure_arrival
    if "chat_id" in row:
        return qwen_arrival
    return mooncake_arrival if "hash_ids" in row else own_arrival
