"""Puts the batcher together as the flags say."""

from __future__ import annotations

from functools import partial

from millrace_router.config import RouterConfig
from millrace_router.engine.batcher import Batcher
from millrace_router.engine.predictor import LatencyPredictor
from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.late_planning import LatePlanning
from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.recovery.shard_status import Timeouts
from millrace_router.scheduler.budgets import Budgets
from millrace_router.scheduler.draft_length import AdaptiveDraftLength
from millrace_router.scheduler.factory import forecaster_from, planner_from, queue_from
from millrace_router.shards.step_channel import StepChannel
from millrace_router.shards.wire import Capacity, ShardInfo
from millrace_router.telemetry.metrics import Metrics
from millrace_router.text.tokenizer import Tokenizer


def batcher_from(  # noqa: PLR0913
    config: RouterConfig,
    budgets: Budgets,
    *,
    shards: StepChannel,
    info: ShardInfo,
    capacity: Capacity,
    tokenizer: Tokenizer,
    metrics: Metrics,
    cost: CostModel,
    late: LatePlanning,
    supervisor: LauncherChannel,
) -> Batcher:
    """A batcher that is not running yet."""
    forecaster = forecaster_from(
        config, budgets, cost, late, block_size=info.block_size, num_blocks=capacity.num_blocks - 1
    )
    return Batcher(
        shards=shards,
        new_planner=partial(
            planner_from,
            budgets,
            cost,
            num_blocks=capacity.num_blocks,
            block_size=info.block_size,
            prefix_caching=config.prefix_caching == "on",
            drafts=AdaptiveDraftLength(cost, max_draft_tokens=budgets.max_draft_tokens)
            if budgets.max_draft_tokens
            else None,
        ),
        waiting=queue_from(config),
        prospects=LatencyPredictor(cost, forecaster, metrics, max_queue_size=config.max_queue_size),
        tokenizer=tokenizer,
        eos_token_ids=info.eos_token_ids,
        metrics=metrics,
        supervisor=supervisor,
        patience=Timeouts(step_seconds=config.step_timeout, recovery_seconds=config.recovery_grace),
        depth=config.steps_in_flight,
        late=late,
    )
