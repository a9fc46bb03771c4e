"""Metrics of steps, the batch and KV blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence, Sized

from millrace_router.engine.in_flight import AnsweredStep
from millrace_router.errors import Quarantined, RouterError
from millrace_router.scheduler.multi_token import Progress
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.state_pages import StatePages
from millrace_router.scheduler.step_plan import METHODS, StepPlan
from millrace_router.telemetry.metrics import Metrics


class _StepMetrics:
    """The series of one kind of step, looked up once because a look-up takes longer than an update."""

    def __init__(self, metrics: Metrics, method: str) -> None:
        self.count = metrics.batch_inference_count.labels(method=method)
        self.success = metrics.batch_inference_success.labels(method=method)
        self.duration = metrics.batch_inference_duration.labels(method=method)
        self.forward = metrics.batch_forward_duration.labels(method=method)
        self.decode = metrics.batch_decode_duration.labels(method=method)
        self.filter = metrics.batch_filter_duration.labels(method=method)


class BatchMetrics:
    """Updates metrics from plans and answers."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._steps = {method: _StepMetrics(metrics, method) for method in METHODS}

    def show(
        self,
        planner: Callable[[], Planner],
        waiting: Sized,
        wait_seconds: Callable[[], float],
    ) -> None:
        """Read queue, batch, KV cache and the predicted wait at every scrape."""
        metrics = self._metrics
        for gauge in (metrics.queue_size, metrics.requests_waiting):
            gauge.follow(lambda: len(waiting))
        for gauge in (metrics.requests_running, metrics.batch_current_size):
            gauge.follow(lambda: len(planner().rows))
        metrics.wait_seconds.follow(wait_seconds)
        metrics.requests_paused.follow(lambda: planner().num_paused)
        metrics.batch_current_max_tokens.follow(lambda: planner().blocks.num_reserved_tokens)
        metrics.kv_blocks_in_use.follow(lambda: planner().blocks.num_owned)
        metrics.kv_cache_usage_ratio.follow(lambda: planner().blocks.usage)
        metrics.kv_blocks_cached.follow(lambda: planner().blocks.num_cached)
        metrics.kv_window_blocks_in_use.follow(
            lambda: sum(each.num_owned for each in planner().blocks.windows)
        )
        metrics.kv_window_blocks_cached.follow(
            lambda: sum(each.num_cached for each in planner().blocks.windows)
        )
        if planner().blocks.states is not None:
            self._show_states(planner)
        if planner().images is not None:
            metrics.image_rows_in_use.follow(lambda: _image_rows(planner()))

    def _show_states(self, planner: Callable[[], Planner]) -> None:
        def states() -> StatePages:
            pages = planner().blocks.states
            assert pages is not None
            return pages

        self._metrics.state_pages.follow(lambda: states().num_pages)
        self._metrics.state_pages_in_use.follow(lambda: states().num_working)
        self._metrics.state_copies.follow(lambda: states().num_copies)

    def sent(self, plan: StepPlan) -> None:
        metrics = self._metrics
        if plan.has_forward:
            self._steps[plan.method].count.inc()
        if plan.encodes:
            metrics.image_tiles_encoded.inc(sum(part.is_last for part in plan.encodes))
        if plan.num_preempted:
            metrics.preemptions.inc(plan.num_preempted)
        if plan.chunks:
            metrics.prefill_tokens.inc(plan.load.prefill_tokens)
        if plan.admitted:
            metrics.batch_next_size.observe(len(plan.admitted))
            num_hit = sum(row.num_cached - row.num_kept for row in plan.admitted)
            metrics.prefix_cache_hit_tokens.inc(num_hit)
            metrics.tokens_recomputed.inc(sum(row.num_recomputed for row in plan.admitted))
        if plan.concat_reason is not None:
            metrics.batch_concat.labels(reason=plan.concat_reason).inc()

    def answered(self, step: AnsweredStep, skipped: Sequence[int]) -> None:
        """Count a step whose tokens have been delivered; `skipped` has each row's number of tokens beyond the first."""
        for num_tokens in set(skipped):
            times = skipped.count(num_tokens)
            self._metrics.request_skipped_tokens.observe(num_tokens, times=times)
        if not step.plan.has_forward:
            return
        timings, series = step.result.timings, self._steps[step.plan.method]
        series.success.inc()
        series.duration.observe(step.answered_at - step.sent_at)
        series.forward.observe(timings.forward)
        series.decode.observe(timings.decode)
        series.filter.observe(time.monotonic() - step.answered_at)
        if timings.concat is not None:
            self._metrics.batch_concat_duration.labels(method="decode").observe(timings.concat)

    def speculated(self, progress: Progress) -> None:
        """Count the draft tokens of a step."""
        if progress.drafted:
            self._metrics.speculation_drafted_tokens.inc(progress.drafted)
            self._metrics.speculation_accepted_tokens.inc(progress.accepted)

    def failed(self, plans: Iterable[StepPlan], kind: str) -> None:
        """Count the end of an epoch, and the steps in flight without an answer, once for each kind of step."""
        self._metrics.recoveries.labels(reason=kind).inc()
        for method in {plan.method for plan in plans if plan.has_forward}:
            self._metrics.batch_inference_failure.labels(method=method).inc()

    def replayed(self, num_entries: int) -> None:
        """Count entries that are admitted again in a new epoch."""
        self._metrics.requests_replayed.inc(num_entries)

    def ended(self, error: RouterError) -> None:
        """Count a request that ended with a failure of the shards."""
        if isinstance(error, Quarantined):
            self._metrics.requests_quarantined.inc()


def _image_rows(planner: Planner) -> int:
    return 0 if planner.images is None else planner.images.num_rows_used
