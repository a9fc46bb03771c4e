"""Whether answers are complete, and how they differ from an undisturbed run's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """Splits chunks into server-sent events, `[DONE]` included; keeps an incomplete event in `rest`."""

    def __init__(self) -> None:
        self.rest = b""
        self.last_id = 0
        """The id of the last event with an id; 0 if no event had one."""
        self.num_numbered = 0
        """Events up to this one."""
        self._num_events = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that `chunk` completes."""
        *blocks, self.rest = (self.rest + chunk).split(b"\n\n")
        found = []
        for block in blocks:
            id_, data = block.split(b"\n", 1) if block.startswith(b"id: ") else (b"", block)
            if data.startswith(b"data:"):
                found.append(data[5:].strip())
                self._num_events += 1
                if id_:
                    self.last_id, self.num_numbered = int(id_[4:]), self._num_events
        return found


@dataclass(slots=True)
class Answer:
    """Everything that a client read of one answer."""

    status: int = 0
    """0 for a connection that broke before the status."""
    headers: dict[str, str] = field(default_factory=dict)
    events: list[Json] = field(default_factory=list)
    """The events of a stream, or the body of any other answer."""
    num_done: int = 0
    """Number of OpenAI's end markers."""
    broken: str = ""
    """The reason of a break before the end, or empty."""
    connected: bool = True
    """Whether the connection was established."""
    last_id: int = 0
    """The id of the last event with an id, after which a client with a key resumes; 0 if there is none."""
    num_numbered: int = 0
    """Events up to this one; later ones come again."""
    sent: float = 0.0
    """By the monotonic clock, in seconds."""

    def take(self, data: bytes) -> None:
        """Add the data of an event, or a body; raises ValueError for anything but JSON."""
        if data == DONE:
            self.num_done += 1
        else:
            self.events.append(orjson.loads(data))

    def resume(self) -> None:
        """Forget the break, and what comes again."""
        self.broken, self.num_done = "", 0
        del self.events[self.num_numbered :]


def stable(value: Json) -> Json:
    """`value` without the parts that differ between two answers to one request."""
    if isinstance(value, list):
        return [stable(item) for item in value]
    if not isinstance(value, dict):
        return value
    # The id of an OpenAI answer is random text; the id of a token is a number.
    return {
        key: stable(item)
        for key, item in value.items()
        if key not in VOLATILE and not (key == "id" and isinstance(item, str))
    }


def in_order(events: Sequence[Json]) -> list[Json]:
    """Events of a stream grouped by choice, because the order across choices is not specified."""
    return sorted(events, key=_choice_index)


def _choice_index(event: Json) -> float:
    choices = event.get("choices") if isinstance(event, dict) else None
    if choices is None:
        return 0.0
    return float(choices[0]["index"]) if choices else float("inf")


def flaws(request: Request, answer: Answer) -> list[str]:
    """Violations within one answer; every accepted answer must end exactly once."""
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
    """The first difference from the answer of the undisturbed run; None for equal answers."""
    both = zip_longest(in_order(answer.events), in_order(reference.events))
    for number, (got, wanted) in enumerate(both, start=1):
        if stable(got) != stable(wanted):
            return f"event {number} is {_short(stable(got))} instead of {_short(stable(wanted))}"
    return None


def nearest(differences: Iterable[str | None]) -> str | None:
    """The last of the differences from several references; None if the answer equals one of them."""
    found = list(differences)
    return None if None in found else found[-1]


def prefix_difference(answer: Answer, reference: Answer) -> str | None:
    """The same for a broken answer, which must be a prefix of the other."""
    if len(answer.events) > len(reference.events):
        return f"{len(answer.events)} events instead of {len(reference.events)}"
    if any(_choice_index(event) > 0 for event in reference.events):
        # Each choice may break at another place, so that the events are no prefix of the whole answer.
        seen = [stable(event) for event in reference.events]
        strange = [event for event in answer.events if stable(event) not in seen]
        return f"{_short(stable(strange[0]))} is not in the answer" if strange else None
    head = Answer(events=reference.events[: len(answer.events)])
    return difference(answer, head)


def _short(value: Json, *, length: int = 300) -> str:
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}..."
