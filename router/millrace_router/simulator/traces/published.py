"""The forms in which request traces are published: Mooncake's, Azure's and Qwen-Bailian's."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from millrace_router.simulator.simulated_request import Arrival
from millrace_router.simulator.traces.lines import (
    COUNT,
    NAME,
    TIME,
    Field,
    Row,
    TraceError,
    to_integer,
    to_number,
    values_of,
)

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
