"""Who is preempted: for blocks, and for the sake of other tenants. Pure choices; the planner carries them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.row import Row

LOOKAHEAD = 2
"""Steps that blocks are counted ahead: those of a preempted row come back when the steps in flight are answered."""


def rows_to_preempt(
    rows: Collection[Row], blocks: BlockManager, retired: Iterable[int]
) -> list[Row]:
    """The most junior rows, as many as it takes for the others to grow for some steps.

    Blocks on their way are counted: those of `retired` slots and of rows whose last token is planned. One row is always
    left, and so are those to which all their blocks are promised.
    """
    if blocks.num_available >= LOOKAHEAD * len(rows):
        return []
    growing = [row for row in rows if row.num_tokens_planned < row.max_tokens]
    coming = sum(blocks.num_releasable(slot) for slot in retired)
    coming += sum(
        blocks.num_releasable(row.slot) for row in rows if row.num_tokens_planned >= row.max_tokens
    )
    short = sum(_need(row, blocks) for row in growing) - blocks.num_available - coming
    victims = sorted((row for row in growing if not row.promised), key=lambda row: row.seniority)
    chosen = []
    while short > 0 and len(victims) > 1:
        victim = victims.pop()
        short -= _need(victim, blocks) + blocks.num_releasable(victim.slot)
        chosen.append(victim)
    return chosen


def _need(row: Row, blocks: BlockManager) -> int:
    """Blocks beyond what it was promised that `row` lacks for the next steps."""
    if row.promised or row.num_prompt_left:
        return 0
    num_tokens = min(row.num_kv_tokens + LOOKAHEAD, row.num_inputs + row.max_tokens - 1)
    return max(0, blocks.count(num_tokens) - row.num_kv_owned // blocks.block_size)


def row_to_yield(rows: Collection[Row], tenant: str) -> Row | None:
    """The row to preempt for an entry of `tenant`: the most junior of the tenant that has most (max-min fairness).

    None unless that brings the two closer together. Rows that may not be preempted count, but do not yield.
    """
    sizes = Counter(row.entry.tenant for row in rows)
    movable = (
        row for row in rows if not row.promised and sizes[row.entry.tenant] > sizes[tenant] + 1
    )
    return max(movable, key=lambda row: (sizes[row.entry.tenant], row.seniority), default=None)
