"""What a simulation says of a fleet, in the units in which people size one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from millrace_router.simulator.tally import Tally


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity of a tally."""

    name: str
    """Short, unique, and a key in JSON."""
    title: str
    """With its unit."""
    of: Callable[[Tally], float]


def _seconds(tally: Tally) -> float:
    return max(tally.ended_at - tally.started_at, 1e-9)


def _busy(tally: Tally) -> float:
    return max(tally.busy_seconds, 1e-9)


def _hit_share(tally: Tally) -> float:
    """Of all input tokens of admitted requests, replays included, those whose KV was cached."""
    return tally.cached_tokens / max(1, tally.cached_tokens + tally.prefill_tokens)


FIGURES = (
    Figure("tokens_per_second", "output tokens/s", lambda t: t.output_tokens / _seconds(t)),
    Figure("requests_per_second", "requests/s", lambda t: t.finished / _seconds(t)),
    Figure("ttft_p50", "TTFT p50, s", lambda t: t.first_token.percentile(50)),
    Figure("ttft_p90", "TTFT p90, s", lambda t: t.first_token.percentile(90)),
    Figure("ttft_p99", "TTFT p99, s", lambda t: t.first_token.percentile(99)),
    Figure("itl_p50", "ITL p50, s", lambda t: t.between_tokens.percentile(50)),
    Figure("itl_p99", "ITL p99, s", lambda t: t.between_tokens.percentile(99)),
    Figure("queue_p50", "queue p50, s", lambda t: t.queue.percentile(50)),
    Figure("queue_p99", "queue p99, s", lambda t: t.queue.percentile(99)),
    Figure("latency_p50", "latency p50, s", lambda t: t.latency.percentile(50)),
    Figure("latency_p99", "latency p99, s", lambda t: t.latency.percentile(99)),
    Figure("batch_size", "batch size, mean", lambda t: t.row_seconds / _busy(t)),
    Figure("kv_use", "KV use, mean", lambda t: t.kv_seconds / _busy(t)),
    Figure("kv_use_max", "KV use, max", lambda t: t.kv_max),
    Figure("busy", "busy share", lambda t: t.busy_seconds / _seconds(t) / max(1, t.replicas)),
    Figure("cache_hit_share", "cache hits, share", _hit_share),
    Figure("prefill_tokens", "prefill tokens", lambda t: float(t.prefill_tokens)),
    Figure("preemptions", "preemptions", lambda t: float(t.preemptions)),
    Figure("finished", "finished", lambda t: float(t.finished)),
    Figure("rejected", "rejected", lambda t: float(sum(t.rejected.values()))),
)
