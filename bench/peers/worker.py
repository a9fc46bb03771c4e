"""The child's side of an engine process: one JSON command a line in, one JSON answer a line out.

It runs in the environment of the engine that it drives, so it imports the standard library alone.
Answers go to a separate pipe (`--answers`), because libraries print to standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

LOAD, RUN = "load", "run"


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and the number of tokens to generate; the end of sequence is ignored."""

    ids: list[int]
    new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The sizes that an engine must have room for."""

    max_streams: int
    max_tokens: int
    """Tokens of one sequence, prompt and output."""
    kv_tokens: int
    """Tokens of all sequences together."""
    threads: int


@dataclass(slots=True)
class Moments:
    """The times of one request, in seconds of one monotonic clock."""

    due: float
    arrivals: list[float] = field(default_factory=list)
    """One for each token."""


class Engine(Protocol):
    """An engine with its model loaded."""

    def run(self, requests: Sequence[Request], concurrency: int) -> list[Moments]:
        """Generate for all requests in order, at most `concurrency` of them in flight."""


class Stepping(Protocol):
    """The part of a peer's own loop that `drive` needs."""

    def add(self, number: int, request: Request) -> None:
        """Queue a request under this number."""

    def step(self) -> Iterable[tuple[int, int, bool]]:
        """Run one step; (number, new tokens, whether it has ended) for each request with new tokens."""


def drive(engine: Stepping, requests: Sequence[Request], concurrency: int) -> list[Moments]:
    """`Engine.run` for a peer with a step function; RuntimeError when an output has another length."""
    moments: list[Moments] = []

    def add() -> None:
        moments.append(Moments(time.perf_counter()))
        engine.add(len(moments) - 1, requests[len(moments) - 1])

    for _ in range(min(concurrency, len(requests))):
        add()
    num_running = len(moments)
    while num_running:
        moved = list(engine.step())
        now = time.perf_counter()
        for number, num_new, has_ended in moved:
            moments[number].arrivals += [now] * num_new
            if has_ended:
                num_running -= 1
                if len(moments) < len(requests):
                    add()
                    num_running += 1
    check_lengths(requests, moments)
    return moments


def check_lengths(requests: Sequence[Request], moments: Sequence[Moments]) -> None:
    """Raise RuntimeError unless each request got exactly the number of tokens it asked for."""
    for number, (request, got) in enumerate(zip(requests, moments, strict=True)):
        if len(got.arrivals) != request.new_tokens:
            raise RuntimeError(
                f"request {number} asked for {request.new_tokens} tokens and got {len(got.arrivals)}"
            )


def main(load: Callable[[Path, Limits], Engine]) -> None:
    """Answer commands until standard input ends. An exception ends the process, with its traceback."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, required=True, help="file descriptor for answers")
    # An exception closes it too: a thread of the engine may keep the process alive.
    with os.fdopen(parser.parse_args().answers, "w") as answers:
        _answer_all(load, answers)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads and children of engines do not always end on request.
    os._exit(0)


def _answer_all(load: Callable[[Path, Limits], Engine], answers: TextIO) -> None:
    engine: Engine | None = None
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        answer: dict[str, Any] = {}
        if command["do"] == LOAD:
            engine = load(Path(command["model"]), Limits(**command["limits"]))
        elif command["do"] == RUN and engine is not None:
            requests = [Request(*fields) for fields in command["requests"]]
            moments = engine.run(requests, command["concurrency"])
            answer["moments"] = [(m.due, m.arrivals) for m in moments]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
