"""Records the positions that a step computed, and its duration."""

from __future__ import annotations

from millrace_router.engine.batch_metrics import BatchMetrics
from millrace_router.engine.in_flight import AnsweredStep
from millrace_router.engine.predictor import LatencyPredictor
from millrace_router.scheduler.planner import Planner


def learn_from(
    step: AnsweredStep, planner: Planner, predictor: LatencyPredictor, metrics: BatchMetrics
) -> None:
    """Record the positions that a step computed, and its duration."""
    plan, result = step.plan, step.result
    progress = planner.computed(
        plan, result.failed_slots, counts=result.counts, computed=result.computed
    )
    if progress is not None:
        metrics.speculated(progress)
        predictor.yielded(progress)
    if plan.has_forward:
        if progress is not None:
            planner.step_took(progress, step.seconds)
        predictor.observe(plan.load if progress is None else progress.load, step.seconds)
