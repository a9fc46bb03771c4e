"""Budgets, queue, planner and forecaster as the flags say, for entries of any kind: the router's or the simulator's."""

from __future__ import annotations

from typing import Protocol

from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.forecast import Forecaster
from millrace_router.prediction.late_planning import MOST, LatePlanning
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.budgets import Budgets
from millrace_router.scheduler.draft_length import LengthPolicy
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.prefix_cache import PrefixCache
from millrace_router.scheduler.tenants import RequestQueue, TenantQueue
from millrace_router.scheduler.waiting import WaitingQueue

DEFAULT_PREFILL_TOKENS = 4096
"""Of one step, where nothing is said and there is room."""
QUANTUM = 64
"""Tokens a tenant gets in a round: fewer than most requests take, so that tenants alternate as finely as they can."""


class Flags(Protocol):
    """The flags that decide how requests are scheduled, as `RouterConfig` has them."""

    @property
    def kv_reservation(self) -> str:
        """`grow` or `full`."""

    @property
    def prefill_chunking(self) -> str:
        """`on` or `off`."""

    @property
    def target_inter_token_latency(self) -> float | None:
        """In milliseconds."""

    @property
    def waiting_served_ratio(self) -> float:
        """Waiting prompts for each running request."""

    @property
    def max_waiting_tokens(self) -> int:
        """In steps."""

    @property
    def steps_in_flight(self) -> int:
        """1 or 2."""

    @property
    def late_planning(self) -> str:
        """`on` or `off`."""

    @property
    def fairness(self) -> str:
        """`none` or `tenant`."""

    @property
    def priority_ageing(self) -> float:
        """In seconds."""

    @property
    def max_queue_wait(self) -> float | None:
        """In seconds."""


def spare_slots(batch_size: int) -> int:
    """A quarter more: as many as may end in the steps in flight, unless all answers are of one length."""
    return max(2, batch_size // 4)


def budgets_from(
    flags: Flags, *, prefill_tokens: int, batch_size: int, speculate: int = 0
) -> Budgets:
    """What the flags say of a step and the batch; `speculate` is what the shards can guess ahead."""
    target = flags.target_inter_token_latency
    return Budgets(
        max_batch_prefill_tokens=prefill_tokens,
        max_batch_size=batch_size,
        spare_slots=spare_slots(batch_size),
        reserve_all=flags.kv_reservation == "full",
        prefill_chunking=flags.prefill_chunking == "on",
        target_inter_token_latency=None if target is None else target / 1000,
        waiting_served_ratio=flags.waiting_served_ratio,
        max_waiting_tokens=flags.max_waiting_tokens,
        share_slots=flags.fairness == "tenant",
        speculate=speculate,
    )


def queue_from(flags: Flags) -> RequestQueue:
    """The order of service that the flags ask for."""
    if flags.fairness == "tenant":
        return TenantQueue(
            quantum=QUANTUM,
            ageing_seconds=flags.priority_ageing,
            max_wait_seconds=flags.max_queue_wait,
        )
    return WaitingQueue(ageing_seconds=flags.priority_ageing, max_wait_seconds=flags.max_queue_wait)


def planner_from(
    budgets: Budgets,
    cost: CostModel,
    *,
    num_blocks: int,
    block_size: int,
    prefix_caching: bool,
    guesses: LengthPolicy | None = None,
) -> Planner:
    """A planner with nothing running; block 0 is one of `num_blocks`."""
    cache = PrefixCache() if prefix_caching else None
    return Planner(budgets, BlockManager(num_blocks, block_size, cache), cost, guesses)


def late_planning_from(flags: Flags, cost: CostModel, *, most: float = MOST) -> LatePlanning:
    """When a step is planned beside one in flight: after at most a share `most` of that."""
    is_late = flags.late_planning == "on" and flags.steps_in_flight > 1
    return LatePlanning(cost, most=most if is_late else 0.0)


def forecaster_from(
    flags: Flags,
    budgets: Budgets,
    cost: CostModel,
    late: LatePlanning,
    *,
    block_size: int,
    num_blocks: int,
) -> Forecaster:
    """A forecaster of this batch; block 0 is not one of `num_blocks`."""
    return Forecaster(
        cost,
        max_batch_size=budgets.max_batch_size,
        max_batch_prefill_tokens=budgets.max_batch_prefill_tokens,
        block_size=block_size,
        num_blocks=num_blocks,
        reserve_all=budgets.reserve_all,
        prefill_chunking=budgets.prefill_chunking,
        target_inter_token_latency=budgets.target_inter_token_latency,
        steps_in_flight=flags.steps_in_flight,
        late=late,
    )
