"""What a piece of generated text turns out to be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call; the first of a call has its id and name, and the pieces of arguments are one JSON object."""

    index: int
    """Which call of the answer, from 0."""
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """Text for the client, and pieces of calls; which of the two came first is not said, as in OpenAI's answers."""

    text: str = ""
    calls: tuple[CallDelta, ...] = ()
