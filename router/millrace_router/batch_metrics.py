"""What the batcher counts: steps, the batch, KV blocks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from millrace_router.allowances import Progress
from millrace_router.entry import Entry
from millrace_router.errors import Quarantined, RouterError
from millrace_router.metrics import Metrics
from millrace_router.planner import Planner
from millrace_router.step_plan import StepPlan
from millrace_router.wire import StepTimings


class BatchMetrics:
    """Turns plans and answers into metrics, under TGI's names where TGI has one."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def waiting(self, num_waiting: int) -> None:
        """Show how many wait."""
        self._metrics.queue_size.set(num_waiting)
        self._metrics.requests_waiting.set(num_waiting)

    def batch(self, planner: Planner[Entry], num_waiting: int) -> None:
        """Show what runs, and what the KV cache holds."""
        self.waiting(num_waiting)
        metrics, blocks = self._metrics, planner.blocks
        metrics.requests_running.set(len(planner.rows))
        metrics.requests_paused.set(planner.num_paused)
        metrics.batch_current_size.set(len(planner.rows))
        metrics.batch_current_max_tokens.set(blocks.num_reserved * blocks.block_size)
        metrics.kv_blocks_in_use.set(blocks.num_owned)
        metrics.kv_blocks_cached.set(blocks.num_cached)

    def sent(self, plan: StepPlan[Entry]) -> None:
        """Count a step that goes out."""
        metrics = self._metrics
        if plan.has_forward:
            metrics.batch_inference_count.labels(method=plan.method).inc()
        if plan.num_preempted:
            metrics.preemptions.inc(plan.num_preempted)
        if plan.chunks:
            metrics.prefill_tokens.inc(plan.load.prefill_tokens)
        if plan.admitted:
            metrics.batch_next_size.observe(len(plan.admitted))
            metrics.prefix_cache_hit_tokens.inc(sum(row.num_cached for row in plan.admitted))
        if plan.concat_reason is not None:
            metrics.batch_concat.labels(reason=plan.concat_reason).inc()

    def answered(
        self,
        plan: StepPlan[Entry],
        timings: StepTimings,
        skipped: Mapping[int, int],
        *,
        sent_at: float,
        answered_at: float,
    ) -> None:
        """Count a step whose tokens have been handed out; `skipped` is how many rows got how many beyond the first."""
        metrics, method = self._metrics, plan.method
        for num_tokens, times in skipped.items():
            metrics.request_skipped_tokens.observe(num_tokens, times=times)
        if not plan.has_forward:
            return
        metrics.batch_inference_success.labels(method=method).inc()
        metrics.batch_inference_duration.labels(method=method).observe(answered_at - sent_at)
        metrics.batch_forward_duration.labels(method=method).observe(timings.forward)
        metrics.batch_decode_duration.labels(method=method).observe(timings.decode)
        metrics.batch_filter_duration.labels(method=method).observe(time.monotonic() - answered_at)
        if timings.concat is not None:
            metrics.batch_concat_duration.labels(method="decode").observe(timings.concat)

    def speculated(self, progress: Progress) -> None:
        """Count the guesses of a step."""
        if progress.drafted:
            self._metrics.speculation_drafted_tokens.inc(progress.drafted)
            self._metrics.speculation_accepted_tokens.inc(progress.accepted)

    def failed(self, plans: Iterable[StepPlan[Entry]], kind: str) -> None:
        """Count an epoch's end, and steps in flight that will never be answered, once for each kind of step."""
        self._metrics.recoveries.labels(reason=kind).inc()
        for method in {plan.method for plan in plans if plan.has_forward}:
            self._metrics.batch_inference_failure.labels(method=method).inc()

    def replayed(self, num_entries: int) -> None:
        """Count entries that are admitted again in a new epoch."""
        self._metrics.requests_replayed.inc(num_entries)

    def recovering(self) -> None:
        """The shards do not serve."""
        self._metrics.recovering.set(1)

    def recovered(self, seconds: float) -> None:
        """The shards serve again, after so many seconds."""
        self._metrics.recovering.set(0)
        self._metrics.recovery_seconds.observe(seconds)

    def ended(self, error: RouterError) -> None:
        """Count a request that a failure of the shards has ended."""
        if isinstance(error, Quarantined):
            self._metrics.requests_quarantined.inc()
