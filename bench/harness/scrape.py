"""Reads the server's `/metrics`: once, or periodically while a load runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from statistics import fmean
from typing import Protocol


class Pages(Protocol):
    """A client that reads pages of the server."""

    async def text(self, path: str) -> str:
        """The body of the page at `path`."""


Samples = Mapping[str, float]
"""Value by series: the name with its labels, as exposed."""


def parse(text: str) -> dict[str, float]:
    """Every sample of an exposition in Prometheus' text format; ValueError for any other line."""
    lines = (line for line in text.splitlines() if line.strip() and not line.startswith("#"))
    samples = {}
    for line in lines:
        series, _, value = line.rpartition(" ")
        if not series:
            raise ValueError(f"not a sample: {line!r}")
        samples[series] = float(value)
    return samples


async def scrape(client: Pages) -> dict[str, float]:
    """The current metrics."""
    return parse(await client.text("/metrics"))


def grown(before: Samples, after: Samples, series: str) -> float:
    """The growth of a counter; a missing series counts as 0."""
    return after.get(series, 0.0) - before.get(series, 0.0)


@asynccontextmanager
async def sampling(client: Pages, *, every: float) -> AsyncIterator[list[dict[str, float]]]:
    """Scrape every `every` seconds for the length of the block, into the yielded list."""
    samples: list[dict[str, float]] = []

    async def run() -> None:
        while True:
            samples.append(await scrape(client))
            await asyncio.sleep(every)

    task = asyncio.create_task(run())
    try:
        yield samples
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def mean_above_zero(samples: Sequence[Samples], series: str) -> float:
    """Mean of a gauge over the samples above 0; 0 for no such sample."""
    values = [value for sample in samples if (value := sample.get(series, 0.0)) > 0]
    return fmean(values) if values else 0.0
