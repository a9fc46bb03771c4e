"""A level of load: the number of requests, their lengths, and their arrival times."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice

NUM_LETTERS = 3
"""Every lower-case word of this length is one token of the benchmark tokenizer."""


def words(num_tokens: int, *, seed: str) -> list[str]:
    """Random words, one token each; the same seed gives the same words."""
    generator = random.Random(seed)
    letters = string.ascii_lowercase
    return ["".join(generator.choices(letters, k=NUM_LETTERS)) for _ in range(num_tokens)]


def prompt(num_tokens: int, *, seed: str) -> str:
    """Text of `num_tokens` tokens; distinct seeds share no useful prefix, so no cache helps."""
    return " ".join(words(num_tokens, seed=seed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Either `concurrency` (closed loop) or `rate` (open loop, requests per second) is set."""

    name: str
    num_requests: int
    prompt_tokens: int
    new_tokens: int
    concurrency: int | None = None
    rate: float | None = None
    seed: int = 0
    given: tuple[str, ...] = ()
    """The user's prompts, in turn; random words when empty."""

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError(f"level {self.name}: set concurrency or rate, and not both")
        if min(self.num_requests, self.prompt_tokens, self.new_tokens) < 1:
            raise ValueError(f"level {self.name}: requests and lengths start at 1")

    def prompts(self) -> Iterator[str]:
        """The level's prompts in order; they depend on its name, seed and position alone."""
        if self.given:
            yield from islice(cycle(self.given), self.num_requests)
            return
        for number in range(self.num_requests):
            yield prompt(self.prompt_tokens, seed=f"{self.name}/{self.seed}/{number}")

    def arrival_seconds(self) -> Iterator[float]:
        """The time of each request after the level's start: a Poisson process of the set rate."""
        assert self.rate is not None
        generator = random.Random(f"{self.name}/{self.seed}/arrivals")
        due = 0.0
        for _ in range(self.num_requests):
            due += generator.expovariate(self.rate)
            yield due


def closed(concurrency: int, prompt_tokens: int, new_tokens: int, *, rounds: int = 2) -> Level:
    """A closed loop in which each of `concurrency` clients sends `rounds` requests in turn."""
    return Level(
        name=f"c={concurrency} {prompt_tokens}+{new_tokens}",
        num_requests=concurrency * rounds,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        concurrency=concurrency,
    )


def poisson(rate: float, prompt_tokens: int, new_tokens: int, *, num_requests: int) -> Level:
    """An open loop: requests arrive at `rate` a second whether or not the server keeps up."""
    return Level(
        name=f"r={rate:g} {prompt_tokens}+{new_tokens}",
        num_requests=num_requests,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        rate=rate,
    )


def parse_level(text: str) -> Level:
    """`c8:128+64`, `c32:128+128x1` (rounds) or `r4:128+64x100` (requests); ValueError otherwise."""
    try:
        kind, rest = text[0], text[1:]
        amount, _, lengths = rest.partition(":")
        lengths, _, count = lengths.partition("x")
        prompt_tokens, new_tokens = (int(part) for part in lengths.split("+"))
        if kind == "c":
            return closed(int(amount), prompt_tokens, new_tokens, rounds=int(count or 2))
        if kind == "r":
            return poisson(float(amount), prompt_tokens, new_tokens, num_requests=int(count or 100))
    except (IndexError, ValueError) as error:
        raise ValueError(f"not a level: {text!r}; say c8:128+64x2 or r4:128+64x100") from error
    raise ValueError(f"not a level: {text!r}; it starts with c (closed) or r (open loop)")
