"""Metrics whose labels are names of adapters, in bounded numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from millrace_router.telemetry.instruments import Counter, Family

MAX_NAMES = 100
OTHER = "other"
"""Label of all adapters after the first `MAX_NAMES`."""


class RequestsByAdapter:
    """Counts requests by adapter; the first names have a series each, and all later ones share one."""

    def __init__(self, family: Family[Counter]) -> None:
        self._family = family
        self._names: set[str] = set()

    def count(self, name: str) -> None:
        """Count a request for the adapter `name`."""
        if name not in self._names and len(self._names) < MAX_NAMES:
            self._names.add(name)
        label = name if name in self._names else OTHER
        self._family.labels(adapter=label).inc()


class LoraRequestsInfo(Collector):
    """vLLM's gauge for gateways: names of running and waiting adapters as labels, and the time of the last change."""

    NAME = "vllm:lora_requests_info"

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.max_lora = 0
        """The most adapters in the shards at a time; without any, the metric has no sample."""
        self._clock = clock
        self._running: frozenset[str] = frozenset()
        self._waiting: frozenset[str] = frozenset()
        self._changed_at = clock()

    def update(self, *, running: Iterable[str], waiting: Iterable[str]) -> None:
        """Replace the names of the adapters of running requests, and of those that wait for their adapter."""
        now_running, now_waiting = frozenset(running), frozenset(waiting)
        if (now_running, now_waiting) != (self._running, self._waiting):
            self._running, self._waiting = now_running, now_waiting
            self._changed_at = self._clock()

    def collect(self) -> Iterator[Metric]:
        """Yield one sample, or nothing without adapters."""
        if not self.max_lora:
            return
        metric = Metric(self.NAME, "Adapters of running and of waiting requests", "gauge")
        labels = {
            "max_lora": str(self.max_lora),
            "running_lora_adapters": _joined(self._running),
            "waiting_lora_adapters": _joined(self._waiting),
        }
        metric.add_sample(self.NAME, labels, self._changed_at)
        yield metric

    def describe(self) -> Iterator[Metric]:
        """Yield the metric without samples."""
        yield Metric(self.NAME, "Adapters of running and of waiting requests", "gauge")


def _joined(names: Iterable[str]) -> str:
    """Return at most `MAX_NAMES` names, separated by commas."""
    return ",".join(sorted(names)[:MAX_NAMES])
