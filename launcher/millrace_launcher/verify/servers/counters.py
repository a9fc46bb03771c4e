"""Increases of a server's counters during a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from millrace_launcher.verify.servers.client import Client

STEPS = "tgi_batch_inference_count"
PROMPT_STEPS = 'tgi_batch_inference_count{method="prefill"}'
PREEMPTIONS = "millrace_preemptions_total"
LOST = 'millrace_recoveries_total{reason="lost"}'
REPLAYED = "millrace_requests_replayed_total"
DRAFTED = "millrace_speculation_drafted_tokens_total"
ACCEPTED = "millrace_speculation_accepted_tokens_total"


class Counted:
    """Increases of counters; zero until the block has ended."""

    def __init__(self) -> None:
        self._before: Mapping[str, float] = {}
        self._after: Mapping[str, float] = {}

    def of(self, name: str) -> int:
        """The increase of the series of this name, or of all series with this name and labels."""
        return int(_total(self._after, name) - _total(self._before, name))

    def between(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Set the values at both ends."""
        self._before, self._after = before, after


@contextmanager
def counting(client: Client) -> Iterator[Counted]:
    """Count during the block. Raises ServerError."""
    before, counted = client.metrics(), Counted()
    yield counted
    counted.between(before, client.metrics())


def _total(metrics: Mapping[str, float], name: str) -> float:
    return sum(
        value
        for series, value in metrics.items()
        if series == name or series.startswith(f"{name}{{")
    )
