"""Who joins the batch next, and with which slot and blocks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from heapq import heappop, heappush
from itertools import chain, count

from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.budgets import Budgets
from millrace_router.scheduler.prefix_cache import CachedBlock
from millrace_router.scheduler.row import Row
from millrace_router.scheduler.tenants import RequestQueue


class Admission:
    """Gives entries slots and blocks, one after the other: nobody is overtaken because he is large.

    Preempted entries come before those that wait, the most senior first. An entry whose next block is being computed
    for another one is not admitted yet: it is going to find that block cached.
    """

    def __init__(self, budgets: Budgets, blocks: BlockManager) -> None:
        self._budgets = budgets
        self._blocks = blocks
        self._paused: list[tuple[int, int, SchedulableRequest]] = []
        self._seniority = count()
        self._free_slots = list(range(budgets.num_slots - 1, -1, -1))

    @property
    def num_paused(self) -> int:
        """Preempted entries that are to be admitted again."""
        return len(self._paused)

    @property
    def num_paused_tokens(self) -> int:
        """Tokens of those so far."""
        return sum(entry.num_inputs for _, _, entry in self._paused)

    def free(self, slot: int) -> None:
        """Take back a slot that no step in flight names."""
        self._free_slots.append(slot)

    def resume(self, row: Row) -> None:
        """Queue the entry of a preempted row, none of whose steps is in flight any more."""
        self.readmit(row.seniority, row.entry)

    def readmit(self, seniority: int, entry: SchedulableRequest) -> None:
        """Queue an entry that was admitted before, with the seniority it had."""
        heappush(self._paused, (seniority, entry.request_id, entry))

    def succeed(self, other: Admission) -> None:
        """Let whoever is admitted here be junior to all that `other` admitted."""
        self._seniority = other._seniority

    def surrender(self) -> list[tuple[int, SchedulableRequest]]:
        """Give up, and return, the preempted entries, each with its seniority."""
        entries = [(seniority, entry) for seniority, _, entry in self._paused]
        self._paused.clear()
        return entries

    def limit(self, budgets: Budgets) -> None:
        """Admit within `budgets` from now on; there are as many slots as before."""
        self._budgets = budgets

    def num_cached(self, entry: SchedulableRequest) -> int:
        """Input tokens of `entry` that are cached now."""
        shareable = self._keys(entry)[: self._num_shareable(entry)]
        return len(self._blocks.find(shareable)) * self._blocks.block_size

    def admit(
        self, waiting: RequestQueue, rows: Collection[Row], *, whole: int | None = None
    ) -> tuple[Row, list[int]] | None:
        """Admit the next entry beside `rows` and return its row and its cached blocks; None if it does not fit.

        With `whole` its prompt has to fit into that many tokens.
        """
        entry = self._next(waiting)
        if entry is None or not self._has_slot(len(rows)):
            return None
        keys = self._keys(entry)
        hits = self._hits(entry, keys)
        if hits is None or (whole is not None and self._num_left(entry, hits) > whole):
            return None
        if self._shortage(entry, hits, rows) > 0:
            return None
        seniority = heappop(self._paused)[0] if self._paused else self._next_seniority(waiting)
        row = self._row(entry, seniority, len(hits) * self._blocks.block_size)
        row.promised = self._needs_all(entry)
        num_tokens = self._num_promised_tokens(entry)
        return row, self._blocks.admit(row.slot, num_tokens, hits=hits, keys=keys)

    def lacks_room(self, waiting: RequestQueue, rows: Collection[Row]) -> bool:
        """Whether the head of the queue finds no slot, or too few blocks, beside `rows`."""
        entry = self._next(waiting)
        if entry is None or self._paused:
            return False
        if not self._has_slot(len(rows)):
            return True
        hits = self._hits(entry, self._keys(entry))
        return hits is not None and self._shortage(entry, hits, rows) > 0

    def num_fitting(self, waiting: RequestQueue, *, most: int, budget: int) -> int:
        """How many entries, up to `most`, `budget` prompt tokens, slots and blocks suffice for."""
        num_blocks, number = self._blocks.num_available, 0
        for entry in chain((item[2] for item in self._paused), waiting):
            hits = self._blocks.find(self._keys(entry)[: self._num_shareable(entry)])
            num_tokens = self._num_promised_tokens(entry)
            budget -= self._num_left(entry, hits)
            num_blocks -= self._blocks.count(num_tokens) - sum(hit.num_pins > 0 for hit in hits)
            if number >= min(most, len(self._free_slots)) or budget < 0 or num_blocks < 0:
                break
            number += 1
        return number

    @property
    def has_free_slot(self) -> bool:
        """Whether there is a slot that no step in flight names."""
        return bool(self._free_slots)

    def _has_slot(self, num_rows: int) -> bool:
        return self.has_free_slot and num_rows < self._budgets.max_batch_size

    def _next(self, waiting: RequestQueue) -> SchedulableRequest | None:
        while self._paused and self._paused[0][2].closed:
            heappop(self._paused)
        return self._paused[0][2] if self._paused else waiting.head()

    def _needs_all(self, entry: SchedulableRequest) -> bool:
        """Whether all blocks it can ever need are promised to `entry`."""
        budgets = self._budgets
        return budgets.reserve_all or entry.num_preemptions >= budgets.max_preemptions

    def _num_promised_tokens(self, entry: SchedulableRequest) -> int:
        """KV positions whose blocks `entry` is promised; the last token's are never needed.

        With everything reserved also those of guesses, as in TGI, although none is made beyond the last token. That
        may not keep out what fits without.
        """
        if not self._needs_all(entry):
            return entry.num_inputs
        num_tokens = entry.num_inputs + entry.max_new_tokens - entry.num_generated - 1
        if self._budgets.reserve_all and self._budgets.speculate:
            most = max(num_tokens, self._blocks.num_blocks * self._blocks.block_size)
            num_tokens = min(num_tokens + self._budgets.speculate, most)
        return num_tokens

    def _shortage(
        self, entry: SchedulableRequest, hits: Sequence[CachedBlock], rows: Iterable[Row]
    ) -> int:
        """Blocks that are missing to admit `entry` beside `rows`; none if not above 0."""
        shortage = self._blocks.shortage(self._num_promised_tokens(entry), hits)
        return shortage + self._margin(entry, rows)

    def _keys(self, entry: SchedulableRequest) -> Sequence[bytes]:
        if self._blocks.cache is None:
            return ()
        return entry.block_keys(entry.num_inputs // self._blocks.block_size)

    def _num_shareable(self, entry: SchedulableRequest) -> int:
        """Blocks that may be taken from the cache; the last token is always computed, for its logits."""
        if entry.wants_prompt_logprobs:
            return 0
        return (entry.num_inputs - 1) // self._blocks.block_size

    def _hits(self, entry: SchedulableRequest, keys: Sequence[bytes]) -> list[CachedBlock] | None:
        """What is cached of the entry; None while somebody computes more of it."""
        shareable = keys[: self._num_shareable(entry)]
        hits = self._blocks.find(shareable)
        if len(hits) < len(shareable) and self._blocks.expects(shareable[len(hits)]):
            return None
        return hits

    def _num_left(self, entry: SchedulableRequest, hits: Sequence[CachedBlock]) -> int:
        return entry.num_inputs - len(hits) * self._blocks.block_size

    def _margin(self, entry: SchedulableRequest, rows: Iterable[Row]) -> int:
        """Blocks to leave over.

        For an entry that may be preempted: one for every row that runs, so that it is not at once. For one that may
        not: all that the rows before it, which may not preempt it either, can ever need.
        """
        if self._budgets.reserve_all:
            return 0
        growing = [row for row in rows if not row.promised]
        if not self._needs_all(entry):
            return len(growing)
        senior = self._paused[0][0] if self._paused else math.inf
        size = self._blocks.block_size
        return sum(
            self._blocks.count(row.num_inputs + row.max_tokens - 1) - row.num_kv_owned // size
            for row in growing
            if row.seniority < senior
        )

    def _next_seniority(self, waiting: RequestQueue) -> int:
        waiting.pop()
        return next(self._seniority)

    def _row(self, entry: SchedulableRequest, seniority: int, num_cached: int) -> Row:
        return Row(
            entry,
            self._free_slots.pop(),
            seniority,
            entry.num_inputs,
            entry.max_new_tokens - entry.num_generated,
            num_cached=num_cached,
            num_prompt_planned=num_cached,
            num_kv_tokens=num_cached,
            num_kv_owned=num_cached,
            num_computed=num_cached,
            num_entered=num_cached,
            is_flexible=self._budgets.speculate > 0 or entry.max_jump_forward_tokens > 0,
        )
