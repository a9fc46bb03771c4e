"""ORCA's load report: a header of the answer that shows a load balancer how busy the server is.

The report has Envoy's `application_utilization` and `rps_fractional`, by which its weighted round robin weighs servers,
and the named metrics of vLLM.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import orjson

from millrace_router.telemetry.metrics import Metrics

FORMAT_HEADER = "endpoint-load-metrics-format"
REPORT_HEADER = "endpoint-load-metrics"
WINDOW_SECONDS = 10.0


class RequestRate:
    """Requests a second over the last 10 s at least; it costs nothing while it is not read."""

    def __init__(self, count: Callable[[], float], clock: Callable[[], float]) -> None:
        """`count` returns the number of requests so far."""
        self._count = count
        self._clock = clock
        self._readings = deque([(clock(), count())], maxlen=2)

    def read(self) -> float:
        """Return the rate; if it was not read for a while, the rate over that time."""
        now, count = self._clock(), self._count()
        since, before = self._readings[0]
        if now - self._readings[-1][0] >= WINDOW_SECONDS:
            self._readings.append((now, count))
        return (count - before) / max(1.0, now - since)


class LoadReport:
    """Renders the report from the gauges of `/metrics`."""

    def __init__(
        self, metrics: Metrics, batch_size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`batch_size` is the number of sequences that run at a time."""
        self._metrics = metrics
        self._batch_size = batch_size
        self._rate = RequestRate(lambda: metrics.request_count.value, clock)

    def render(self, form: str) -> str | None:
        """Return the value of the header in the form `TEXT` or `JSON`; None for any other form."""
        name = form.strip().upper()
        if name not in {"TEXT", "JSON"}:
            return None
        metrics = self._metrics
        kv_usage, waiting = metrics.kv_cache_usage_ratio.value, metrics.requests_waiting.value
        busy = (metrics.requests_running.value + waiting) / self._batch_size
        fields = {
            "application_utilization": round(max(kv_usage, busy), 6),
            "rps_fractional": round(self._rate.read(), 6),
        }
        named = {"kv_cache_usage_perc": round(kv_usage, 6), "num_requests_waiting": waiting}
        if name == "JSON":
            return f"JSON {orjson.dumps(fields | {'named_metrics': named}).decode()}"
        flat = fields | {f"named_metrics.{key}": value for key, value in named.items()}
        return "TEXT " + ", ".join(f"{key}={value}" for key, value in flat.items())
