"""What came back, whether it is whole, and how it differs from the answer of an undisturbed run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import orjson

from bench.faults.chaos.population import Request

Json = Any
DONE = b"[DONE]"
VOLATILE = frozenset({"created", "cached_tokens", "prompt_tokens_details"})
"""Keys whose values depend on when a request is served."""


class EventReader:
    """Cuts server-sent events out of chunks; comments are counted, an event cut off stays in `rest`."""

    def __init__(self) -> None:
        self.rest = b""
        self.num_comments = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that this chunk completes."""
        *blocks, self.rest = (self.rest + chunk).split(b"\n\n")
        self.num_comments += sum(block.startswith(b":") for block in blocks)
        return [block[5:].strip() for block in blocks if block.startswith(b"data:")]


@dataclass(slots=True)
class Answer:
    """Everything that was read of one answer."""

    status: int = 0
    """0 when not even the status came."""
    headers: dict[str, str] = field(default_factory=dict)
    events: list[Json] = field(default_factory=list)
    """Of a stream its events, otherwise the body alone."""
    num_done: int = 0
    """OpenAI's ends of stream."""
    broken: str = ""
    """Why the connection broke before the end, if it did."""
    connected: bool = True
    """Whether there was a connection at all."""

    def take(self, data: bytes) -> None:
        """Take the data of an event, or a body; raises ValueError when it is not JSON."""
        if data == DONE:
            self.num_done += 1
        else:
            self.events.append(orjson.loads(data))


def stable(value: Json) -> Json:
    """`value` without what differs between two answers to the same request."""
    if isinstance(value, list):
        return [stable(item) for item in value]
    if not isinstance(value, dict):
        return value
    # OpenAI's answers are named at random; tokens have numbers.
    return {
        key: stable(item)
        for key, item in value.items()
        if key not in VOLATILE and not (key == "id" and isinstance(item, str))
    }


def in_order(events: Sequence[Json]) -> list[Json]:
    """Events of a stream with those of each choice together: how choices interleave is nobody's promise."""
    return sorted(events, key=_choice_index)


def _choice_index(event: Json) -> float:
    choices = event.get("choices") if isinstance(event, dict) else None
    if choices is None:
        return 0.0
    return float(choices[0]["index"]) if choices else float("inf")


def flaws(request: Request, answer: Answer) -> list[str]:
    """What is wrong with an answer by itself; every answer that is accepted must end exactly once."""
    if answer.status != 200:
        return [f"status {answer.status}: {_short(answer.events)}"]
    if errors := [event for event in answer.events if isinstance(event, dict) and "error" in event]:
        return [f"an error in the stream: {_short(errors[0])}"]
    if not answer.events:
        return ["no events"] if request.streams else ["no body"]
    if not request.streams:
        return [] if len(answer.events) == 1 else [f"{len(answer.events)} bodies"]
    return _openai_flaws(answer) if request.is_openai else _native_flaws(answer)


def _native_flaws(answer: Answer) -> list[str]:
    found = []
    indexes = [event.get("index") for event in answer.events]
    if indexes != list(range(1, len(indexes) + 1)):
        found.append(f"token indexes {_short(indexes)}")
    ends = [event.get("index") for event in answer.events if event["generated_text"] is not None]
    if ends != indexes[-1:]:
        found.append(f"{len(ends)} ends, at tokens {ends} of {len(indexes)}")
    return found


def _openai_flaws(answer: Answer) -> list[str]:
    found = []
    if answer.num_done != 1:
        found.append(f"{answer.num_done} times [DONE]")
    reasons: dict[int, list[str | None]] = {}
    for event in answer.events:
        for choice in event["choices"]:
            reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
    for index, given in reasons.items():
        if sum(map(bool, given)) != 1 or not given[-1]:
            found.append(f"choice {index} ended {sum(map(bool, given))} times")
    return found


def difference(answer: Answer, reference: Answer) -> str | None:
    """Where an answer first differs from that of the undisturbed run; None where they are equal."""
    both = zip_longest(in_order(answer.events), in_order(reference.events))
    for number, (got, wanted) in enumerate(both, start=1):
        if stable(got) != stable(wanted):
            return f"event {number} is {_short(stable(got))} instead of {_short(stable(wanted))}"
    return None


def prefix_difference(answer: Answer, reference: Answer) -> str | None:
    """The same for an answer that broke off: what there is of it must be a beginning of the other."""
    if len(answer.events) > len(reference.events):
        return f"{len(answer.events)} events instead of {len(reference.events)}"
    if any(_choice_index(event) > 0 for event in reference.events):
        # Of several choices, each broke off somewhere; a beginning of one may follow a beginning of another.
        seen = [stable(event) for event in reference.events]
        strange = [event for event in answer.events if stable(event) not in seen]
        return f"{_short(stable(strange[0]))} is not in the answer" if strange else None
    head = Answer(events=reference.events[: len(answer.events)])
    return difference(answer, head)


def _short(value: Json, *, length: int = 300) -> str:
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}..."
