"""The cases of an engine without HTTP: the requests, and the figure that counts."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from bench.comparison.roofline import Machine, batch_seconds, decode_step_seconds, prefill_seconds
from bench.harness.checkpoints import Shape
from bench.peers.worker import Limits, Request
from millrace.load.levels import Level, closed, poisson, prompt
from millrace.load.measurement import Timeline


class Figure(StrEnum):
    """The compared figure of a run; the value is its unit."""

    PER_TOKEN = "ms/token"
    """Between tokens, one stream."""
    FIRST_TOKEN = "ms"
    """Time to the first token."""
    RATE = "tok/s"
    """Output tokens over the time from the first request to the last token."""

    @property
    def more_is_better(self) -> bool:
        """Whether it is a rate."""
        return self is Figure.RATE


@dataclass(frozen=True)
class Case:
    """Requests that are given, and run, all at once."""

    name: str
    figure: Figure
    lengths: tuple[tuple[int, int], ...]
    """(prompt tokens, new tokens) of each request."""

    @property
    def at_once(self) -> int:
        """Requests in flight."""
        return len(self.lengths)

    @cached_property
    def kv_tokens(self) -> int:
        """The most tokens in the cache at once."""
        return sum(map(sum, self.lengths))

    def requests(self, tokenizer: Tokenizer) -> list[Request]:
        """The prompts of a load level of the same name and lengths, as token ids."""
        return [
            Request(
                tokenizer.encode(prompt(length, seed=f"{self.name}/0/{number}")).ids, new_tokens
            )
            for number, (length, new_tokens) in enumerate(self.lengths)
        ]

    def value(self, timelines: Sequence[Timeline]) -> float:
        """The figure of one run."""
        match self.figure:
            case Figure.PER_TOKEN:
                return 1000 * statistics.fmean(gap for t in timelines for gap in t.gaps)
            case Figure.FIRST_TOKEN:
                return 1000 * statistics.median(t.first_token_seconds for t in timelines)
            case Figure.RATE:
                num_tokens = sum(len(t.arrivals) for t in timelines)
                start = min(t.due for t in timelines)
                return num_tokens / (max(t.arrivals[-1] for t in timelines) - start)

    def floor(self, shape: Shape, machine: Machine) -> float:
        """The figure at the roofline."""
        middle = [length + new_tokens // 2 for length, new_tokens in self.lengths]
        match self.figure:
            case Figure.PER_TOKEN:
                return 1000 * decode_step_seconds(shape, machine, middle)
            case Figure.FIRST_TOKEN:
                return 1000 * prefill_seconds(shape, machine, [self.lengths[0][0]])
            case Figure.RATE:
                seconds = batch_seconds(shape, machine, self.lengths)
                return sum(new for _, new in self.lengths) / seconds


def ragged(num_requests: int = 64, *, seed: int = 0) -> tuple[tuple[int, int], ...]:
    """Prompts of 16 to 512 tokens and outputs of 16 to 256, uniform and uneven."""
    generator = random.Random(seed)
    return tuple(
        (generator.randint(16, 512), generator.randint(16, 256)) for _ in range(num_requests)
    )


BATCH = Case("c=32 128+128", Figure.RATE, ((128, 128),) * 32)
CASES = {
    "135m": (
        Case("one stream", Figure.PER_TOKEN, ((128, 128),)),
        BATCH,
        Case("64 ragged", Figure.RATE, ragged()),
        Case("first of 1024", Figure.FIRST_TOKEN, ((1024, 1),)),
    ),
    "1b": (
        Case("one stream", Figure.PER_TOKEN, ((128, 64),)),
        Case("8 of 128+128", Figure.RATE, ((128, 128),) * 8),
        BATCH,
        Case("first of 1024", Figure.FIRST_TOKEN, ((1024, 1),)),
    ),
}

DEFAULT_LEVELS: dict[str, tuple[Level, ...]] = {
    "135m": (
        closed(1, 128, 64, rounds=4),
        closed(8, 128, 64),
        closed(32, 128, 64),
        closed(32, 128, 128, rounds=1),
        poisson(4, 128, 64, num_requests=60),
    ),
    "1b": (),
}
"""Levels over HTTP, by the name of the checkpoint."""


def warm_up(cases: Sequence[Case]) -> Case:
    """A short run of the longest prompt and the widest batch of `cases`, for lazy initialisation."""
    longest = max(length for case in cases for length, _ in case.lengths)
    widest = min(8, max(case.at_once for case in cases))
    return Case("warm-up", Figure.RATE, ((longest, 4), *((32, 8),) * (widest - 1)))


def limits_for(cases: Sequence[Case], *, threads: int) -> Limits:
    """Limits that fit every case and the warm-up."""
    every = [*cases, warm_up(cases)]
    return Limits(
        max_streams=max(case.at_once for case in every),
        max_tokens=max(sum(pair) for case in every for pair in case.lengths) + 1,
        kv_tokens=max(case.kv_tokens for case in every),
        threads=threads,
    )


def tokenizer_of(model: Path) -> Tokenizer:
    """The checkpoint's tokenizer."""
    return Tokenizer.from_file(str(model / "tokenizer.json"))
