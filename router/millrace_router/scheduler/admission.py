"""Which request joins the batch next, and its slot and blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count

from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.prefix_cache import CachedBlock
from millrace_router.scheduler.queue import RequestQueue
from millrace_router.scheduler.step_plan import Budgets, Row


class Admission:
    """Gives requests slots and blocks, one after the other: no request overtakes one that lacks room.

    Preempted requests come before waiting ones, the most senior first. A request whose next block is being computed
    for another request is not admitted yet: it will find that block in the cache.
    """

    def __init__(self, budgets: Budgets, blocks: BlockManager) -> None:
        self._budgets = budgets
        self._blocks = blocks
        self._paused: list[tuple[int, int, SchedulableRequest]] = []
        self._seniority = count()
        self._free_slots = list(range(budgets.num_slots - 1, -1, -1))

    @property
    def num_paused(self) -> int:
        """Preempted requests that wait for their next admission."""
        return len(self._paused)

    @property
    def num_paused_tokens(self) -> int:
        """Prompt and generated tokens of those requests."""
        return sum(request.num_inputs for _, _, request in self._paused)

    def free(self, slot: int) -> None:
        """Take back a slot that no step in flight names."""
        self._free_slots.append(slot)

    def readmit(self, seniority: int, request: SchedulableRequest) -> None:
        """Queue a request that was admitted before, with the same seniority."""
        heappush(self._paused, (seniority, request.request_id, request))

    def withdraw(self, leaves: Callable[[SchedulableRequest], bool]) -> list[SchedulableRequest]:
        """Remove and return the preempted requests for which `leaves` is true."""
        requests = [request for _, _, request in self._paused if leaves(request)]
        if requests:
            self._paused = [item for item in self._paused if not leaves(item[2])]
            heapify(self._paused)
        return requests

    def take_over(self, other: Admission) -> None:
        """Make all future admissions junior to the admissions of `other`."""
        self._seniority = other._seniority

    def take_all(self) -> list[tuple[int, SchedulableRequest]]:
        """Remove and return the preempted requests, each with its seniority."""
        requests = [(seniority, request) for seniority, _, request in self._paused]
        self._paused.clear()
        return requests

    def limit(self, budgets: Budgets) -> None:
        """Replace the budgets; the number of slots stays."""
        self._budgets = budgets

    def num_cached(self, request: SchedulableRequest) -> int:
        """Input tokens of `request` that are cached now."""
        shareable = self._keys(request)[: self._num_shareable(request)]
        return len(self._blocks.find(shareable)) * self._blocks.block_size

    def admit(
        self,
        waiting: RequestQueue,
        rows: Collection[Row],
        *,
        early: SchedulableRequest | None = None,
    ) -> tuple[Row, list[int]] | None:
        """Admit the next request while `rows` run; return its row and its cached blocks, or None if it does not fit.

        With `early`, a waiting request, that one is admitted ahead of its turn if the next request still fits as well.
        """
        request = self._next(waiting)
        if request is None or not self._has_slot(len(rows)):
            return None
        kept_free = 0
        if early is not None and early is not request:
            if self._paused or not self._has_slot(len(rows), at_least=2):
                return None
            kept_free = self._blocks.count(self._num_promised_tokens(request)) + 1
            request = early
        keys = self._keys(request)
        hits = self._hits(request, keys)
        if hits is None or self._shortage(request, hits, rows) + kept_free > 0:
            return None
        seniority = heappop(self._paused)[0] if self._paused else self._take(waiting, request)
        row = self._row(request, seniority, len(hits) * self._blocks.block_size)
        row.promised = self._needs_all(request)
        num_tokens = self._num_promised_tokens(request)
        return row, self._blocks.admit(row.slot, num_tokens, hits=hits, keys=keys)

    def precedes(self, waiting: RequestQueue, early: Row | None) -> bool:
        """Return whether the next request comes before `early`, a row that was admitted ahead of its turn."""
        request = self._next(waiting)
        if request is None or early is None:
            return request is not None
        return bool(self._paused) or request.queued_at < early.entry.queued_at

    def lacks_room(self, waiting: RequestQueue, rows: Collection[Row]) -> bool:
        """Return whether the head of the queue finds no free slot, or too few blocks, while `rows` run."""
        request = self._next(waiting)
        if request is None or self._paused:
            return False
        if not self._has_slot(len(rows)):
            return True
        hits = self._hits(request, self._keys(request))
        return hits is not None and self._shortage(request, hits, rows) > 0

    @property
    def has_free_slot(self) -> bool:
        """Whether there is a slot that no step in flight names."""
        return bool(self._free_slots)

    def _has_slot(self, num_rows: int, *, at_least: int = 1) -> bool:
        num_free = min(len(self._free_slots), self._budgets.max_batch_size - num_rows)
        return num_free >= at_least

    def _next(self, waiting: RequestQueue) -> SchedulableRequest | None:
        while self._paused and self._paused[0][2].closed:
            heappop(self._paused)
        return self._paused[0][2] if self._paused else waiting.head()

    def _needs_all(self, request: SchedulableRequest) -> bool:
        """Return whether `request` is promised all blocks that it can ever need."""
        budgets = self._budgets
        return budgets.reserve_all or request.num_preemptions >= budgets.max_preemptions

    def _num_promised_tokens(self, request: SchedulableRequest) -> int:
        """KV positions whose blocks are promised to `request`; the last token's is never needed.

        With full reservation, they include draft tokens as in TGI, although there are none beyond the last token. That
        does not keep out a request that would fit otherwise.
        """
        if not self._needs_all(request):
            return request.num_inputs
        num_tokens = request.num_inputs + request.max_new_tokens - request.num_generated - 1
        if self._budgets.reserve_all and self._budgets.max_draft_tokens:
            most = max(num_tokens, self._blocks.num_blocks * self._blocks.block_size)
            num_tokens = min(num_tokens + self._budgets.max_draft_tokens, most)
        return num_tokens

    def _shortage(
        self, request: SchedulableRequest, hits: Sequence[CachedBlock], rows: Iterable[Row]
    ) -> int:
        """Return blocks missing to admit `request` while `rows` run; it fits if the result is not above 0."""
        shortage = self._blocks.shortage(self._num_promised_tokens(request), hits)
        return shortage + self._margin(request, rows)

    def _keys(self, request: SchedulableRequest) -> Sequence[bytes]:
        if self._blocks.cache is None:
            return ()
        return request.block_keys(request.num_inputs // self._blocks.block_size)

    def _num_shareable(self, request: SchedulableRequest) -> int:
        """Full blocks that may come from the cache; the last token is always computed, for its logits."""
        if request.wants_prompt_logprobs:
            return 0
        return (request.num_inputs - 1) // self._blocks.block_size

    def _hits(self, request: SchedulableRequest, keys: Sequence[bytes]) -> list[CachedBlock] | None:
        """Return the cached blocks of the request; None while another request computes its next block."""
        shareable = keys[: self._num_shareable(request)]
        hits = self._blocks.find(shareable)
        if len(hits) < len(shareable) and self._blocks.expects(shareable[len(hits)]):
            return None
        return hits

    def _margin(self, request: SchedulableRequest, rows: Iterable[Row]) -> int:
        """Return blocks to leave free.

        For a request that may be preempted: one for each growing row, so that it is not preempted at once. For one
        that may not be preempted: all blocks that more senior rows can ever need.
        """
        if self._budgets.reserve_all:
            return 0
        growing = [row for row in rows if not row.promised]
        if not self._needs_all(request):
            return len(growing)
        senior = self._paused[0][0] if self._paused else math.inf
        size = self._blocks.block_size
        return sum(
            self._blocks.count(row.num_inputs + row.max_tokens - 1) - row.num_kv_owned // size
            for row in growing
            if row.seniority < senior
        )

    def _take(self, waiting: RequestQueue, request: SchedulableRequest) -> int:
        """Take `request` out of the queue and return its seniority."""
        if request is waiting.head():
            waiting.pop()
        else:
            waiting.take(request)
        return next(self._seniority)

    def _row(self, request: SchedulableRequest, seniority: int, num_cached: int) -> Row:
        return Row(
            request,
            self._free_slots.pop(),
            seniority,
            request.num_inputs,
            request.max_new_tokens - request.num_generated,
            num_cached=num_cached,
            num_prompt_planned=num_cached,
            num_kv_tokens=num_cached,
            num_kv_owned=num_cached,
            num_computed=num_cached,
            num_entered=num_cached,
            is_multi_token=self._budgets.max_draft_tokens > 0
            or request.max_jump_forward_tokens > 0,
        )
