"""Request traces in the forms in which Mooncake, Azure and Qwen-Bailian publish them, and copies of traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from heapq import merge
from itertools import islice
from operator import attrgetter
from pathlib import Path
from random import Random

from pydantic import Field as FlagField

from millrace.simulate.simulated_request import Arrival
from millrace.simulate.trace import (
    COUNT,
    NAME,
    TIME,
    Field,
    Row,
    TraceError,
    in_order,
    own_arrival,
    to_integer,
    to_number,
    values_of,
)
from millrace.simulate.workload import Workload

MOONCAKE_TOKENS, QWEN_TOKENS = 512, 16
"""Prompt tokens that one of `hash_ids` stands for; the last may stand for fewer."""


def _ids(given: object) -> tuple[int, ...]:
    if not isinstance(given, list):
        raise TypeError("no list")
    return tuple(map(to_integer, given))


def _moment(given: object) -> float:
    if not isinstance(given, str):
        raise TypeError("no text")
    moment = datetime.fromisoformat(given)
    # Naive times are of one zone, so UTC gives their differences without leaps of a local clock.
    since = moment.replace(tzinfo=None) - datetime(1970, 1, 1)
    return since.total_seconds() - (offset.total_seconds() if (offset := moment.utcoffset()) else 0)


_IDS: Field = (_ids, lambda _: True, "a list of integers")
_NUMBER: Field = (to_integer, lambda _: True, "an integer")
MOONCAKE: Mapping[str, Field] = {
    "timestamp": (to_number, lambda value: 0.0 <= value < 1e15, "a number of milliseconds"),
    "input_length": COUNT,
    "output_length": COUNT,
    "hash_ids": _IDS,
}
QWEN: Mapping[str, Field] = {
    "chat_id": _NUMBER,
    "parent_chat_id": _NUMBER,
    "timestamp": TIME,
    "input_length": COUNT,
    "output_length": COUNT,
    "type": NAME,
    "turn": _NUMBER,
    "hash_ids": _IDS,
}
AZURE: Mapping[str, Field] = {
    "TIMESTAMP": (_moment, lambda _: True, "a date and a time"),
    "ContextTokens": COUNT,
    "GeneratedTokens": COUNT,
}


def mooncake_arrival(row: Row, where: str) -> Arrival:
    """The request of a line of Mooncake's, whose times are milliseconds; raises TraceError."""
    values = values_of(row, MOONCAKE, tuple(MOONCAKE), where)
    return _chained(values, values["timestamp"] / 1000, MOONCAKE_TOKENS, where)


def qwen_arrival(row: Row, where: str) -> Arrival:
    """The request of a line of Qwen-Bailian's, whose times are seconds; raises TraceError.

    `hash_ids` say what it shares, so the conversation that it belongs to is not needed.
    """
    values = values_of(row, QWEN, tuple(QWEN), where)
    return _chained(values, values["timestamp"], QWEN_TOKENS, where)


def azure_arrival(row: Row, where: str) -> Arrival:
    """The request of a line of Azure's, whose time is seconds since 1970; raises TraceError."""
    values = values_of(row, AZURE, tuple(AZURE), where)
    return Arrival(values["TIMESTAMP"], values["ContextTokens"], values["GeneratedTokens"])


def _chained(values: Mapping[str, object], time: float, tokens: int, where: str) -> Arrival:
    prompt, output, ids = (values[name] for name in ("input_length", "output_length", "hash_ids"))
    assert isinstance(prompt, int)
    assert isinstance(output, int)
    assert isinstance(ids, tuple)
    if len(ids) != -(-prompt // tokens):
        raise TraceError(
            f"{where}: hash_ids has {len(ids)} numbers for {prompt} tokens, not one for each {tokens}"
        )
    return Arrival(time, prompt, output, chain=ids, chain_tokens=tokens)


class TraceWorkload(Workload):
    """A workload whose trace may have a published form, and is sent many times over."""

    copies: int = FlagField(default=1, ge=1)
    """Copies of the trace side by side, each with its own prompts, at other times."""

    def _recorded(self, trace: Path) -> Iterator[Arrival]:
        return copied(islice(read_published(trace), self.trace_requests), self.copies)


def read_published(path: Path) -> Iterator[Arrival]:
    """Yield the requests of a `.csv` or `.jsonl` file in the form that its first line has.

    The times of an Azure trace, which are dates, are counted from its first request.

    Raises:
        TraceError: a line is not a request, or arrives before the line above it.

    """
    form: Callable[[Row, str], Arrival] | None = None
    first = 0.0

    def arrival_of(row: Row, where: str) -> Arrival:
        nonlocal form, first
        if form is None:
            form = _form(row)
            first = form(row, where).arrived_at if form is azure_arrival else 0.0
        arrival = form(row, where)
        return arrival._replace(arrived_at=arrival.arrived_at - first) if first else arrival

    return in_order(path, arrival_of)


def _form(row: Row) -> Callable[[Row, str], Arrival]:
    if "TIMESTAMP" in row:
        return azure_arrival
    if "chat_id" in row:
        return qwen_arrival
    return mooncake_arrival if "hash_ids" in row else own_arrival


def copied(arrivals: Iterator[Arrival], copies: int) -> Iterator[Arrival]:
    """Yield the requests of so many copies in order; one copy is the trace as it is.

    Copies begin at times spread over the length of the trace, and what would come after its end comes at its beginning,
    so the load is even from beginning to end. They share no prompts. Each begins at a random time of its part of that
    length: at equal distances the requests of all copies would come in an order that repeats, and a policy that sends
    requests in turn would give a replica the same few requests of each copy.
    """
    if copies == 1:
        yield from arrivals
        return
    trace = list(arrivals)
    if not trace:
        return
    random = Random("copies")
    span = trace[-1].arrived_at * (1 + 1 / len(trace))
    num_ids = 1 + max((max(arrival.chain) for arrival in trace if arrival.chain), default=0)
    yield from merge(
        *(
            _copy(trace, copy, (copy + random.random()) * span / copies, span, num_ids)
            for copy in range(copies)
        ),
        key=attrgetter("arrived_at"),
    )


def _copy(
    trace: Sequence[Arrival], copy: int, shift: float, span: float, num_ids: int
) -> Iterator[Arrival]:
    wrapped = next(
        (place for place, each in enumerate(trace) if each.arrived_at + shift >= span), len(trace)
    )
    for part, offset in ((trace[wrapped:], shift - span), (trace[:wrapped], shift)):
        for arrival in part:
            yield arrival._replace(
                arrived_at=arrival.arrived_at + offset,
                chain=tuple([number + copy * num_ids for number in arrival.chain]),
                group=arrival.group and f"{arrival.group}~{copy}",
            )
