"""The simulator's own form of a trace, whose fields are those of `Arrival`."""

from __future__ import annotations

from collections.abc import Mapping

from millrace_router.simulator.simulated_request import Arrival
from millrace_router.simulator.traces.lines import (
    COUNT,
    NAME,
    TIME,
    Field,
    Row,
    TraceError,
    to_integer,
    values_of,
)

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


def own_arrival(row: Row, where: str) -> Arrival:
    """The request of a line, which is named `where`; raises TraceError."""
    values = values_of(row, FIELDS, REQUIRED, where)
    if values.get("prefix_tokens", 0) and not values.get("group"):
        raise TraceError(f"{where}: prefix_tokens without a group to share them with")
    return Arrival(**values)
