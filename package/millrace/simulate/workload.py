"""The requests of a simulation: from a file, at a rate, or from clients that wait for their answers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, islice
from pathlib import Path
from random import Random
from typing import Annotated, Protocol, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from millrace.simulate.simulated_request import Arrival
from millrace.simulate.trace import read_trace

KINDS = {"fixed": 1, "uniform": 2, "exponential": 1, "lognormal": 2, "pareto": 2}
"""Kinds of distribution, and the number of parameters of each before the optional maximum."""
SYNTAX = (
    "512, uniform:LEAST:MOST, exponential:MEAN, lognormal:MEDIAN:SIGMA or pareto:LEAST:ALPHA;"
    " a last :MAXIMUM cuts the tail"
)

LONGEST = 1e9
"""Most tokens of any length."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens, all at least 1."""

    kind: str
    parameters: tuple[float, ...]
    maximum: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a distribution, as described by `SYNTAX`.

        Raises:
            ValueError: the text is invalid.

        """
        kind, *words = text.split(":")
        if not words:
            kind, words = "fixed", [kind]
        try:
            numbers = [float(word) for word in words]
        except ValueError:
            raise ValueError(f"{text!r} is not a length: use {SYNTAX}") from None
        count = KINDS.get(kind)
        if count is None or len(numbers) not in (count, count + 1) or not _valid(kind, numbers):
            raise ValueError(f"{text!r} is not a length: use {SYNTAX}")
        maximum = int(numbers[count]) if len(numbers) > count else None
        return cls(kind, tuple(numbers[:count]), maximum)

    def __str__(self) -> str:
        """The text that `parse` reads."""
        maximum = () if self.maximum is None else (self.maximum,)
        return ":".join([self.kind, *(f"{number:g}" for number in (*self.parameters, *maximum))])

    def draw(self, random: Random) -> int:
        try:
            value = self._value(random)
        except OverflowError:
            value = LONGEST
        return max(1, int(min(value, self.maximum or LONGEST)))

    def _value(self, random: Random) -> float:
        first, *rest = self.parameters
        match self.kind:
            case "uniform":
                return random.uniform(first, rest[0] + 1)
            case "exponential":
                return random.expovariate(1 / first)
            case "lognormal":
                return first * random.lognormvariate(0.0, rest[0])
            case "pareto":
                return first * random.paretovariate(rest[0])
            case _:
                return first


def _valid(kind: str, numbers: list[float]) -> bool:
    positive = all(0 < number <= LONGEST for number in numbers)
    return positive and (kind != "uniform" or numbers[0] <= numbers[1])


def _parse_lengths(value: object) -> object:
    return value if isinstance(value, Lengths) else Lengths.parse(str(value))


def _split(value: object) -> object:
    return tuple(value.split(",")) if isinstance(value, str) else value


LengthsText = Annotated[Lengths, BeforeValidator(_parse_lengths)]


class Workload(BaseModel):
    """A trace, an open loop at `rate`, or a closed loop of `clients`. The same seed gives the same requests.

    Raises:
        ValueError: none or several of these are given.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    trace: Path | None = Field(
        default=None, description="Requests from a .csv or .jsonl file, with a line for each."
    )
    speedup: float = Field(default=1.0, gt=0, description="How much faster the trace is replayed.")
    trace_requests: int | None = Field(
        default=None, ge=1, description="Requests at the trace's beginning; all when absent."
    )
    rate: float | None = Field(
        default=None, gt=0, description="Requests per second, as a Poisson process."
    )
    burst_size: int = Field(
        default=1, ge=1, description="Requests that come at once; bursts keep to --rate."
    )
    clients: int | None = Field(
        default=None, ge=1, description="Clients that each send one request after the other."
    )
    think_seconds: float = Field(
        default=0.0, ge=0, description="Pause of a client after each answer."
    )
    ramp_seconds: float = Field(
        default=0.0, ge=0, description="Time in which the clients begin, one after the other."
    )
    requests: int = Field(default=1000, ge=1, description="Requests in all, without --trace.")
    prompt_tokens: LengthsText = Field(
        default=Lengths("fixed", (512.0,)), description=f"Prompt lengths: {SYNTAX}."
    )
    output_tokens: LengthsText = Field(
        default=Lengths("fixed", (128.0,)), description="Answer lengths, written the same way."
    )
    max_new_tokens: int | None = Field(
        default=None, ge=1, description="What clients ask for at most; absent, nothing."
    )
    prefix_groups: int = Field(
        default=0, ge=0, description="System prompts, one of which begins each prompt; 0 for none."
    )
    prefix_tokens: int = Field(
        default=1000, ge=1, description="Tokens of a system prompt, in addition to the prompt's."
    )
    tenant_weights: Annotated[tuple[float, ...], BeforeValidator(_split)] = Field(
        default=(), description="How much each tenant sends, such as 50,1."
    )
    adapters: int = Field(
        default=0, ge=0, description="LoRA adapters, the nth of which has 1/n of the first's share."
    )
    adapter_pages: int = Field(
        default=16, ge=0, description="Pages of 64 KiB that each of them takes on a shard."
    )
    image_share: float = Field(
        default=0.0, ge=0, le=1, description="Share of the requests that have an image."
    )
    image_tiles: LengthsText = Field(
        default=Lengths("fixed", (13.0,)),
        description="Tiles of an image, written like lengths; each is encoded by itself.",
    )
    tile_tokens: int = Field(
        default=64, ge=1, description="Tokens of a tile, in addition to the prompt's."
    )
    seed: int = Field(default=0, description="Of all random choices.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if [self.trace, self.rate, self.clients].count(None) != 2:
            raise ValueError("give one of --trace, --rate and --clients")
        if self.burst_size > 1 and self.rate is None:
            raise ValueError("--burst-size goes with --rate")
        if self.speedup != 1.0 and self.trace is None:
            raise ValueError("--speedup goes with --trace")
        if self.trace_requests is not None and self.trace is None:
            raise ValueError("--trace-requests goes with --trace")
        if any(weight <= 0 for weight in self.tenant_weights):
            raise ValueError("--tenant-weights must be above 0")
        return self

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the requests of a trace or an open loop in order.

        Raises:
            TraceError: the trace is invalid.

        """
        if self.trace is not None:
            for arrival in self._recorded(self.trace):
                yield arrival._replace(arrived_at=arrival.arrived_at / self.speedup)
            return
        draw, random = self.requester("open"), Random(f"{self.seed} arrivals")  # noqa: S311
        bursts_per_second, now = (self.rate or 1.0) / self.burst_size, 0.0
        for number in range(self.requests):
            if number % self.burst_size == 0:
                now += random.expovariate(bursts_per_second)
            yield draw.request(now)

    def _recorded(self, trace: Path) -> Iterator[Arrival]:
        """Yield the requests of the trace at the times that it has; raises TraceError."""
        return islice(read_trace(trace), self.trace_requests)

    def requester(self, name: str) -> Requester:
        """A generator of the requests of the loop `name`."""
        return Requester(self, Random(f"{self.seed} {name}"))  # noqa: S311


class Requester:
    """Draws requests. The draws do not depend on times, so two rates have the same requests."""

    def __init__(self, workload: Workload, random: Random) -> None:
        self._workload = workload
        self._random = random
        self._adapters = [str(number) for number in range(1, workload.adapters + 1)]
        self._adapter_weights = list(
            accumulate(1 / number for number in range(1, workload.adapters + 1))
        )
        self._tenants = [str(number) for number in range(1, len(workload.tenant_weights) + 1)]

    def request(self, now: float) -> Arrival:
        """Draw the next request, which arrives `now`."""
        workload, random = self._workload, self._random
        prompt_tokens = workload.prompt_tokens.draw(random)
        output_tokens = workload.output_tokens.draw(random)
        group, prefix_tokens, tenant = "", 0, ""
        if workload.prefix_groups:
            group = str(random.randrange(workload.prefix_groups))
            prefix_tokens = workload.prefix_tokens
        if self._tenants:
            tenant = random.choices(self._tenants, workload.tenant_weights)[0]
        adapter = ""
        if self._adapters:
            (adapter,) = random.choices(self._adapters, cum_weights=self._adapter_weights)
        tiles = 0
        if workload.image_share and random.random() < workload.image_share:
            tiles = workload.image_tiles.draw(random)
        return Arrival(
            now,
            prompt_tokens + prefix_tokens + tiles * workload.tile_tokens,
            output_tokens,
            workload.max_new_tokens,
            group,
            prefix_tokens,
            tenant=tenant,
            adapter=adapter,
            adapter_pages=workload.adapter_pages,
            tiles=tiles,
            tile_tokens=workload.tile_tokens,
        )


class Source(Protocol):
    """Requests in order of time."""

    @property
    def next_at(self) -> float:
        """When the next request arrives; infinity if none does before another one ends."""

    @property
    def waits_for_answers(self) -> bool:
        """Whether the end of a request may bring the next one."""

    def take(self) -> Arrival:
        """The next request."""

    def left(self, now: float) -> None:
        """A request has ended, or was refused."""


class OpenLoop:
    """Requests that arrive at given times, whether others end or not."""

    waits_for_answers = False

    def __init__(self, arrivals: Iterator[Arrival]) -> None:
        self._arrivals = arrivals
        self._next = next(arrivals, None)

    @property
    def next_at(self) -> float:
        """When the next request arrives."""
        return math.inf if self._next is None else self._next.arrived_at

    def take(self) -> Arrival:
        taken = self._next
        assert taken is not None
        self._next = next(self._arrivals, None)
        return taken

    def left(self, now: float) -> None:
        """Do nothing."""


class ClosedLoop:
    """Clients that each send one request after the other; a refused client goes on with its next request."""

    waits_for_answers = True

    def __init__(
        self,
        draw: Requester,
        *,
        requests: int,
        clients: int,
        think_seconds: float,
        ramp_seconds: float = 0.0,
    ) -> None:
        self._draw = draw
        self._num_left = requests
        self._ready = [ramp_seconds * number / clients for number in range(clients)]
        self._think_seconds = think_seconds

    @property
    def next_at(self) -> float:
        """When the next client is ready."""
        return self._ready[0] if self._ready and self._num_left else math.inf

    def take(self) -> Arrival:
        """The request of the next client."""
        self._num_left -= 1
        return self._draw.request(heappop(self._ready))

    def left(self, now: float) -> None:
        """Its client thinks, and is ready again."""
        heappush(self._ready, now + self._think_seconds)
