"""Reads the server's `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping
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
