"""A trace for small machines, and its requests as prompts of token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from operator import attrgetter
from pathlib import Path
from random import Random

from bench.scale.traces import read_published
from millrace.simulate.simulated_request import Arrival

FIRST_ID = 320
"""Lower ids are control tokens and single bytes."""


def shortened(arrival: Arrival, divisor: int) -> Arrival:
    """The request with prompt, answer and each part of its chain so many times shorter; raises ValueError."""
    if arrival.chain_tokens % divisor and arrival.chain:
        raise ValueError(
            f"parts of {arrival.chain_tokens} tokens cannot be {divisor} times shorter"
        )
    output = max(1, round(arrival.output_tokens / divisor))
    return arrival._replace(
        prompt_tokens=-(-arrival.prompt_tokens // divisor),
        output_tokens=output,
        max_new_tokens=output,
        chain_tokens=arrival.chain_tokens // divisor if arrival.chain else 1,
    )


def load(path: Path, *, skip: int, requests: int, divisor: int, speedup: float) -> list[Arrival]:
    """Requests of a trace after the first `skip`, so many times shorter and faster, from second 0 on.

    Raises:
        TraceError: the trace is invalid.
        ValueError: it is too short, or its parts cannot be made shorter.

    """
    taken: list[Arrival] = list(islice(read_published(path), skip, skip + requests))
    if len(taken) < requests:
        raise ValueError(f"{path} has no {skip + requests} requests")
    begin = taken[0].arrived_at
    return [
        shortened(arrival._replace(arrived_at=(arrival.arrived_at - begin) / speedup), divisor)
        for arrival in taken
    ]


def shifted(arrivals: Sequence[Arrival], most_seconds: float, seed: int) -> list[Arrival]:
    """The load with each request up to so many seconds later, drawn by `seed`; as it is for seed 0."""
    if not seed:
        return list(arrivals)
    random = Random(f"shift {seed}")
    moved = [
        arrival._replace(arrived_at=arrival.arrived_at + random.uniform(0, most_seconds))
        for arrival in arrivals
    ]
    return sorted(moved, key=attrgetter("arrived_at"))


def prompt_ids(arrival: Arrival, number: int, vocab_size: int, run: str = "") -> list[int]:
    """Token ids that are equal where the chains of two requests are; without one they are the request's own.

    Those of another `run` are others.
    """
    ids = range(vocab_size)[FIRST_ID:] or range(vocab_size)
    if not arrival.chain:
        return Random(f"request {number} {run}").choices(ids, k=arrival.prompt_tokens)
    tokens: list[int] = []
    for part in arrival.chain:
        tokens += Random(f"{part} {run}").choices(ids, k=arrival.chain_tokens)
    return tokens[: arrival.prompt_tokens]


def completion(prompt: Sequence[int], max_tokens: int) -> bytes:
    """A streamed completion of exactly `max_tokens` tokens."""
    body = {"prompt": list(prompt), "model": "tgi", "max_tokens": max_tokens}
    return json.dumps(body | {"ignore_eos": True, "stream": True}).encode()


def num_output_tokens(arrivals: Sequence[Arrival]) -> int:
    """Tokens of all answers."""
    return sum(arrival.output_tokens for arrival in arrivals)
