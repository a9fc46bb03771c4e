"""Makes budgets, queue, blocks and forecaster from the flags, for the router and the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millrace_router.config import RouterConfig
from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.forecast import Forecaster
from millrace_router.prediction.late_planning import MOST, LatePlanning
from millrace_router.prediction.traffic import TrafficStatistics
from millrace_router.scheduler.block_ledger import BlockLedger
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.prefix_cache import PrefixCache
from millrace_router.scheduler.queue import RequestQueue, WaitingQueue
from millrace_router.scheduler.state_pages import StatePages
from millrace_router.scheduler.step_plan import Budgets
from millrace_router.scheduler.tenants import TenantQueue
from millrace_router.scheduler.window_blocks import WindowBlocks, WindowGroup

DEFAULT_PREFILL_TOKENS = 4096
"""Prefill tokens of one step, by default and if they fit."""
QUANTUM = 64
"""Tokens that a tenant gets in a round: fewer than most requests take, so that tenants alternate often."""


def spare_slots(batch_size: int) -> int:
    """A quarter of the batch: most rows that end within the steps in flight, unless all answers are equally long."""
    return max(2, batch_size // 4)


def budgets_from(
    flags: RouterConfig, *, prefill_tokens: int, batch_size: int, max_draft_tokens: int = 0
) -> Budgets:
    """Return the budgets by the flags; the shards can make `max_draft_tokens` per row and step."""
    target = flags.target_inter_token_latency
    return Budgets(
        max_batch_prefill_tokens=prefill_tokens,
        max_batch_size=batch_size,
        spare_slots=spare_slots(batch_size),
        reserve_all=flags.kv_reservation == "full",
        shortest_first=flags.prefill_order == "shortest",
        target_inter_token_latency=None if target is None else target / 1000,
        share_slots=flags.fairness != "none",
        max_draft_tokens=max_draft_tokens,
    )


def queue_from(flags: RouterConfig) -> RequestQueue:
    """Return the queue with the order of service of the flags."""
    if flags.fairness != "none":
        return TenantQueue(
            quantum=QUANTUM,
            ageing_seconds=flags.priority_ageing,
            max_wait_seconds=flags.max_queue_wait,
        )
    return WaitingQueue(ageing_seconds=flags.priority_ageing, max_wait_seconds=flags.max_queue_wait)


def blocks_from(  # noqa: PLR0913
    num_blocks: int,
    block_size: int,
    *,
    prefix_caching: bool,
    new_cache: Callable[[], PrefixCache] = PrefixCache,
    ledger: BlockLedger | None = None,
    windows: Sequence[WindowGroup] = (),
    whole_tokens: int = 0,
    state_pages: int = 0,
) -> BlockManager:
    """Return blocks and pages of states that are all free.

    Block 0 is one of `num_blocks`, and page 0 one of `state_pages`, if there are any. `whole_tokens` of a prompt may
    have to be computed in one step.
    """
    first, groups = num_blocks, []
    for group in windows:
        groups.append(
            WindowBlocks(
                group,
                block_size,
                first=first,
                caching=prefix_caching,
                ledger=ledger,
                whole_tokens=whole_tokens,
            )
        )
        first += group.num_blocks
    cache = new_cache() if prefix_caching else None
    states = None
    if state_pages:
        states = StatePages(state_pages, block_size, first=first, ledger=ledger)
    return BlockManager(num_blocks, block_size, cache, ledger, groups, states)


def late_planning_from(flags: RouterConfig, cost: CostModel, *, most: float = MOST) -> LatePlanning:
    """Make the rule that delays planning a step by at most a share `most` of the step in flight."""
    is_late = flags.late_planning == "on" and flags.steps_in_flight > 1
    return LatePlanning(cost, most=most if is_late else 0.0)


def forecaster_from(
    flags: RouterConfig,
    budgets: Budgets,
    cost: CostModel,
    late: LatePlanning,
    *,
    block_size: int,
    num_blocks: int,
    traffic: TrafficStatistics | None = None,
) -> Forecaster:
    """Return a forecaster for this batch; block 0 is not one of `num_blocks`."""
    return Forecaster(
        cost,
        max_batch_size=budgets.max_batch_size,
        max_batch_prefill_tokens=budgets.max_batch_prefill_tokens,
        block_size=block_size,
        num_blocks=num_blocks,
        reserve_all=budgets.reserve_all,
        shortest_first=budgets.shortest_first,
        target_inter_token_latency=budgets.target_inter_token_latency,
        steps_in_flight=flags.steps_in_flight,
        late=late,
        traffic=traffic,
    )
