"""Records what the answer to a step says beside its tokens."""

from __future__ import annotations

from millrace_router.engine.batch_metrics import BatchMetrics
from millrace_router.engine.in_flight import AnsweredStep
from millrace_router.engine.predictor import LatencyPredictor
from millrace_router.request.entry import Entry, entry_of
from millrace_router.scheduler.planner import Planner
from millrace_router.shards.step_result import StepResult


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


def deliver_prompts(result: StepResult, planner: Planner) -> list[Entry]:
    """Hand the results of prompts to their streams, and note closed texts; returns the entries that end with them."""
    for slot in result.closed_slots:
        if (row := planner.row(slot)) is not None:
            entry_of(row.entry).is_closed = True
    for slot, logprobs in result.prompt_logprobs:
        if (row := planner.row(slot)) is not None:
            entry_of(row.entry).accept_prompt_logprobs(logprobs)
    ended = []
    for slot, values in result.pooled:
        if (row := planner.row(slot)) is not None:
            entry = entry_of(row.entry)
            entry.accept_pooled(values)
            planner.end(row)
            ended.append(entry)
    return ended
