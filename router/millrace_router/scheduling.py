"""Puts the batcher together as the flags say."""

from __future__ import annotations

from functools import partial

from millrace_router.batcher import Batcher
from millrace_router.budgets import Budgets
from millrace_router.config import RouterConfig
from millrace_router.cost import CostModel
from millrace_router.entry import Entry
from millrace_router.late_planning import LatePlanning
from millrace_router.metrics import Metrics
from millrace_router.patience import Patience
from millrace_router.policies import forecaster_from, planner_from, queue_from
from millrace_router.prospects import Prospects
from millrace_router.shard_client import ShardedClient
from millrace_router.speculation import Speculator
from millrace_router.supervisor import Supervisor
from millrace_router.tenants import TenantQueue
from millrace_router.tokenizer import Tokenizer
from millrace_router.waiting import WaitingQueue
from millrace_router.wire import Capacity, ShardInfo


def batcher_from(  # noqa: PLR0913
    config: RouterConfig,
    budgets: Budgets,
    *,
    shards: ShardedClient,
    info: ShardInfo,
    capacity: Capacity,
    tokenizer: Tokenizer,
    metrics: Metrics,
    cost: CostModel,
    late: LatePlanning,
    supervisor: Supervisor,
) -> Batcher:
    """A batcher that is not running yet."""
    forecaster = forecaster_from(
        config, budgets, cost, late, block_size=info.block_size, num_blocks=capacity.num_blocks - 1
    )
    waiting: WaitingQueue[Entry] | TenantQueue[Entry] = queue_from(config)
    return Batcher(
        shards=shards,
        new_planner=partial(
            planner_from,
            budgets,
            cost,
            num_blocks=capacity.num_blocks,
            block_size=info.block_size,
            prefix_caching=config.prefix_caching == "on",
            guesses=Speculator(cost, most=budgets.speculate) if budgets.speculate else None,
        ),
        waiting=waiting,
        prospects=Prospects(cost, forecaster, metrics, max_queue_size=config.max_queue_size),
        tokenizer=tokenizer,
        eos_token_ids=info.eos_token_ids,
        metrics=metrics,
        supervisor=supervisor,
        patience=Patience(step_seconds=config.step_timeout, recovery_seconds=config.recovery_grace),
        depth=config.steps_in_flight,
        late=late,
    )
