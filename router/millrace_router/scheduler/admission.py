"""Which request joins the batch next, and its slot and blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count

from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.block_manager import BlockManager, Parked
from millrace_router.scheduler.image_features import ImageFeatures
from millrace_router.scheduler.prefix_cache import CachedBlock
from millrace_router.scheduler.queue import RequestQueue
from millrace_router.scheduler.step_plan import Budgets, Row


class Admission:
    """Gives requests slots and blocks, one after the other: no request overtakes one that lacks room.

    Preempted and interrupted requests come before waiting ones, the most senior first. A request whose next block is
    being computed for another request is not admitted yet: it will find that block in the cache. A request with parked
    blocks goes on in them; where blocks are missing, parked ones are taken back, and their requests computed again.
    """

    def __init__(
        self, budgets: Budgets, blocks: BlockManager, images: ImageFeatures | None = None
    ) -> None:
        """`images` is for a model that reads them: their requests are admitted once they are encoded."""
        self._budgets = budgets
        self._blocks = blocks
        self.images = images
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
            self._blocks.free_parked(leaves)
        return requests if self.images is None else requests + self.images.withdraw(leaves)

    def take_over(self, other: Admission) -> None:
        """Make all future admissions junior to the admissions of `other`."""
        self._seniority = other._seniority

    def take_all(self) -> list[tuple[int, SchedulableRequest]]:
        """Remove and return the preempted requests, each with its seniority."""
        requests = [(seniority, request) for seniority, _, request in self._paused]
        self._paused.clear()
        return requests if self.images is None else requests + self.images.take_all()

    def limit(self, budgets: Budgets) -> None:
        """Replace the budgets; the number of slots stays."""
        self._budgets = budgets

    def num_cached(self, request: SchedulableRequest) -> int:
        """Input tokens of `request` that are cached now."""
        shareable = self._keys(request)[: self._num_shareable(request)]
        return len(self._find(shareable)) * self._blocks.block_size

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
        if self.images is not None and self._lacks_features(request):
            seniority = heappop(self._paused)[0] if self._paused else self._take(waiting, request)
            self._have_encoded(seniority, request)
            return self.admit(waiting, rows, early=None if early is request else early)
        parked = self._blocks.parked(request.request_id) if self._paused else None
        if parked is not None:
            return self._go_on(request, parked)
        kept_free = next_longest = 0
        if early is not None and early is not request:
            if self._paused or not self._has_slot(len(rows), at_least=2):
                return None
            kept_free = self._blocks.count(self._num_promised_tokens(request)) + 1
            next_longest, request = _longest(request), early
            if self.images is not None and self._lacks_features(request):
                self._have_encoded(self._take(waiting, request), request)
                return None
        keys = self._keys(request)
        hits = self._hits(request, keys)
        if hits is None:
            return None
        if not self._make_room(request, hits, rows, kept_free=kept_free, next_longest=next_longest):
            return None
        seniority = heappop(self._paused)[0] if self._paused else self._take(waiting, request)
        num_cached = len(hits) * self._blocks.block_size
        row = self._row(request, seniority, num_cached, num_entered=num_cached)
        num_tokens, longest = self._num_promised_tokens(request), _longest(request)
        if self._blocks.states is not None:
            matched = len(self._blocks.find(keys[: self._num_shareable(request)]))
            self._blocks.states.admit(row, keys[: len(hits)], num_matched=matched)
        blocks = self._blocks.admit(row.slot, num_tokens, hits=hits, keys=keys, longest=longest)
        row.window_starts = self._blocks.window_starts(row.slot)
        return row, blocks

    def _make_room(
        self,
        request: SchedulableRequest,
        hits: Sequence[CachedBlock],
        rows: Collection[Row],
        *,
        kept_free: int,
        next_longest: int,
    ) -> bool:
        """Take parked blocks back until `request` fits, if that suffices; whether it fits."""
        while self._shortage(request, hits, rows) + kept_free > 0 or (
            self._blocks.windows
            and self._blocks.window_shortage(_longest(request), kept_free=next_longest) > 0
        ):
            if not self._blocks.free_junior_parked():
                return False
        return True

    def _lacks_features(self, request: SchedulableRequest) -> bool:
        """Return whether pictures of `request` have to be encoded before it is admitted."""
        assert self.images is not None
        if not request.images:
            return False
        return not self.images.is_ready(request, self._num_kept(request))

    def _num_kept(self, request: SchedulableRequest) -> int:
        """Input tokens that `request` would not compute if it was admitted now."""
        parked = self._blocks.parked(request.request_id)
        return self.num_cached(request) if parked is None else parked.num_positions

    def _have_encoded(self, seniority: int, request: SchedulableRequest) -> None:
        """Have the pictures of a request encoded that has left the queue, unless they are."""
        assert self.images is not None
        self.images.wait(seniority, request, self._num_kept(request))
        for each in self.images.take_ready():
            self.readmit(*each)

    def _go_on(self, request: SchedulableRequest, parked: Parked) -> tuple[Row, list[int]] | None:
        """Admit the next request in its parked blocks: as the row that it was, it needs no margin for other rows."""
        num_tokens, num_held = self._num_promised_tokens(request), len(parked.blocks)
        longest = _longest(request)
        while self._blocks.shortage(num_tokens, num_held=num_held) > 0 or (
            self._blocks.windows and self._blocks.window_shortage(longest, parked=parked) > 0
        ):
            if not self._blocks.free_junior_parked(but=parked):
                return None
        seniority, size = heappop(self._paused)[0], self._blocks.block_size
        num_entered = len(parked.pins) * size
        row = self._row(request, seniority, parked.num_positions, num_entered=num_entered)
        row.num_kept, row.num_kv_owned = parked.num_positions, num_held * size
        keys = self._keys(request)
        blocks = self._blocks.unpark(row.slot, parked, num_tokens, keys=keys, longest=longest)
        row.window_starts = self._blocks.window_starts(row.slot)
        return row, blocks

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
        if hits is None:
            return False
        if self._blocks.windows and self._blocks.window_shortage(_longest(request)) > 0:
            return True
        return self._shortage(request, hits, rows) > 0

    @property
    def has_free_slot(self) -> bool:
        """Whether there is a slot that no step in flight names."""
        return bool(self._free_slots)

    def _has_slot(self, num_rows: int, *, at_least: int = 1) -> bool:
        num_free = min(len(self._free_slots), self._budgets.max_batch_size - num_rows)
        if self._blocks.states is not None:
            num_free = min(num_free, self._blocks.states.num_available)
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
        num_tokens = _longest(request)
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
        hits = self._find(shareable)
        if len(hits) < len(shareable) and self._blocks.expects(shareable[len(hits)]):
            return None
        return hits

    def _find(self, keys: Sequence[bytes]) -> list[CachedBlock]:
        """The cached blocks at the beginning of the chain `keys` from which a prompt can go on."""
        hits = self._blocks.find(keys)
        if hits and self._blocks.states is not None:
            del hits[self._blocks.states.depth(keys[: len(hits)]) :]
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

    def _row(
        self, request: SchedulableRequest, seniority: int, num_cached: int, *, num_entered: int
    ) -> Row:
        num_interrupted, request.num_interrupted = request.num_interrupted, 0
        image_rows: Sequence[tuple[int, int, int]] = ()
        if self.images is not None and request.images:
            image_rows = self.images.rows_of(request, num_cached)
        return Row(
            request,
            self._free_slots.pop(),
            seniority,
            request.num_inputs,
            request.max_new_tokens - request.num_generated,
            num_cached=num_cached,
            image_rows=image_rows,
            num_prompt_planned=num_cached,
            num_kv_tokens=num_cached,
            num_kv_owned=num_cached,
            num_computed=num_cached,
            num_entered=num_entered,
            num_recomputed=max(0, num_interrupted - num_cached),
            promised=self._needs_all(request),
            is_multi_token=self._budgets.max_draft_tokens > 0
            or request.max_jump_forward_tokens > 0,
        )


def _longest(request: SchedulableRequest) -> int:
    """Return the most KV positions that `request` can ever have; the last token's is never needed."""
    return request.num_inputs + request.max_new_tokens - request.num_generated - 1
