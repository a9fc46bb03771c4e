"""Which rows are preempted: for blocks, other tenants and other adapters. The planner carries these choices out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.queue import RequestQueue
from millrace_router.scheduler.step_plan import Row

LOOKAHEAD = 2
"""Steps for which blocks are counted in advance; a preempted row returns its blocks once its steps are answered."""


def rows_to_preempt(
    rows: Collection[Row], blocks: BlockManager, retired: Iterable[int]
) -> list[Row]:
    """Return the most junior rows, as many as are necessary for the others to grow for `LOOKAHEAD` steps.

    Blocks that will soon be free count as free: the blocks of `retired` slots and of rows whose last token is
    planned. One row always stays, and so do rows to which all their blocks are promised. Parked blocks are taken back
    before any row is chosen.
    """
    if blocks.num_available >= LOOKAHEAD * len(rows):
        return []
    growing = [row for row in rows if row.num_tokens_planned < row.max_tokens]
    coming = sum(blocks.num_releasable(slot) for slot in retired)
    coming += sum(
        blocks.num_releasable(row.slot) for row in rows if row.num_tokens_planned >= row.max_tokens
    )
    need = sum(_need(row, blocks) for row in growing) - coming
    while need > blocks.num_available and blocks.free_junior_parked():
        pass
    short = need - blocks.num_available
    victims = sorted((row for row in growing if not row.promised), key=lambda row: row.seniority)
    chosen = []
    while short > 0 and len(victims) > 1:
        victim = victims.pop()
        short -= _need(victim, blocks) + blocks.num_releasable(victim.slot)
        chosen.append(victim)
    return chosen


def _need(row: Row, blocks: BlockManager) -> int:
    """Return blocks that `row` lacks for the next `LOOKAHEAD` steps; 0 if they are promised."""
    if row.promised or row.num_prompt_left:
        return 0
    num_tokens = min(row.num_kv_tokens + LOOKAHEAD, row.num_inputs + row.max_tokens - 1)
    return max(0, blocks.count(num_tokens) - row.num_kv_owned // blocks.block_size)


def row_to_yield(rows: Collection[Row], tenant: str) -> Row | None:
    """The row to preempt for a request of `tenant`: the most junior of the tenant with most rows (max-min fairness).

    None unless this makes the two tenants more equal. Rows that may not be preempted count, but are not returned.
    """
    sizes = Counter(row.entry.tenant for row in rows)
    movable = (
        row for row in rows if not row.promised and sizes[row.entry.tenant] > sizes[tenant] + 1
    )
    return max(movable, key=lambda row: (sizes[row.entry.tenant], row.seniority), default=None)


class Expulsion:
    """The adapters that make room, and the requests that have left the batch for that."""

    def __init__(self) -> None:
        self.digests: Collection[str] = ()
        """Digests of the adapters; set before a plan."""
        self._withdrawn: list[SchedulableRequest] = []

    def names(self, request: SchedulableRequest) -> bool:
        return request.adapter is not None and request.adapter.digest in self.digests

    def take_rows(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows to preempt. A row first yields a token, so that its request gets on in every admission."""
        leaving = [
            row
            for row in rows
            if 0 < row.num_tokens_planned < row.max_tokens and self.names(row.entry)
        ]
        for row in leaving:
            row.has_yielded = True
        return leaving

    def requeue(self, yielded: list[Row], waiting: RequestQueue) -> None:
        """Put the requests of preempted rows back into the queue, or among those that have left."""
        for row in yielded:
            if self.names(row.entry):
                self.withdraw([row.entry])
            elif not row.entry.closed:
                waiting.append(row.entry)
        yielded.clear()

    def withdraw(self, requests: Iterable[SchedulableRequest]) -> None:
        """Add requests that have left; those whose clients have left are forgotten."""
        self._withdrawn += [request for request in requests if not request.closed]

    def take(self) -> list[SchedulableRequest]:
        """Remove and return the requests that have left; no step in flight computes them."""
        taken, self._withdrawn = self._withdrawn, []
        return taken
