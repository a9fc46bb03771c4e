"""Steps ahead without a decision: every row decodes, no request joins and no row ends."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from millrace_router.prediction.step_load import StepLoad
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.preemption import LOOKAHEAD
from millrace_router.scheduler.queue import RequestQueue
from millrace_router.scheduler.step_plan import Row, StepPlan
from millrace_router.simulator.metrics import SimulationMetrics
from millrace_router.simulator.pipeline import Flight
from millrace_router.simulator.simulated_request import request_of


def num_uneventful_steps(planner: Planner, flights: Collection[Flight]) -> int:
    """The number of steps in which, by the number of blocks, the planner decodes every row and does nothing else.

    A lower bound: it may be less than the true number.
    """
    rows, blocks = planner.rows, planner.blocks
    if not (rows and planner.only_decodes and not any(flight.ends_rows for flight in flights)):
        return 0
    # The order of evictions must not depend on the moment at which a block is found to be cached already.
    if any(request_of(row).may_repeat_blocks for row in rows.values()):
        return 0
    # Each row takes a block in `block_size` steps, and one more at most. No row may be preempted.
    return (blocks.num_available // len(rows) - LOOKAHEAD - 1) * blocks.block_size


def last_alike(
    may_end: Mapping[int, Sequence[Row]],
    planner: Planner,
    last_sent: int,
    depth: int,
) -> int:
    """Number of the last step that decodes every row; `may_end` has the rows by the first step that may end them.

    The first of those steps still decodes every row, and so do the steps sent before the router learns of that end,
    `depth` in all.
    """
    ends_at = min(may_end, default=0)
    last = ends_at + depth - 1
    for row in may_end.get(ends_at, ()):
        num_planned = row.num_tokens_planned + ends_at - last_sent
        if planner.rows.get(row.slot) is not row or num_planned != request_of(row).num_tokens_left:
            return ends_at - 1
        last = min(last, ends_at + row.max_tokens - num_planned)
    return min([last, *(other - 1 for other in may_end if other > ends_at)])


def decode_all(planner: Planner) -> StepPlan:
    """The next step, if it decodes every row."""
    rows = planner.rows
    context = len(rows) + sum([row.num_kv_tokens for row in rows.values()])
    return StepPlan(decodes=list(rows), load=StepLoad(decodes=len(rows), context=context))


def blocks_grown(planner: Planner, num_steps: int) -> list[int]:
    """Blocks that all rows together take in each of the next steps, if all rows decode."""
    grown, size = [0] * num_steps, planner.blocks.block_size
    for row in planner.rows.values():
        for step in range(row.num_kv_owned - row.num_kv_tokens, num_steps, size):
            grown[step] += 1
    return grown


def count_steps(
    metrics: SimulationMetrics, planner: Planner, sent: Sequence[float], load: StepLoad
) -> None:
    """Count steps of these durations that decode every row."""
    blocks = planner.blocks
    num_owned = blocks.num_owned
    for seconds, grown in zip(sent, blocks_grown(planner, len(sent)), strict=True):
        num_owned += grown
        metrics.took(seconds, load, num_owned / blocks.num_blocks)


def waiting_matters(
    waiting: RequestQueue, planner: Planner, flights: Iterable[Flight], *, may_expire: bool
) -> bool:
    """Whether waiting requests may change a plan before a row ends."""
    if not len(waiting):
        return False
    if planner.budgets.share_slots or may_expire:
        return True
    # The head of the queue may wait for blocks of a prompt in flight.
    is_computing = any(flight.plan.chunks for flight in flights)
    return is_computing or not planner.lacks_room(waiting)
