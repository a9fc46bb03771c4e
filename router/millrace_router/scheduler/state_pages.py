"""Which sequence owns which page of states, and where copies of earlier states are. Pure bookkeeping.

A recurrent layer has one state for all earlier tokens, so that a prompt goes on from a cached prefix only where a copy
of its state was taken. Copies are taken at ends of blocks, by the step that computes the last token before.

A step changes the page of a sequence in place, so that the page of an ended epoch may be ahead of the answers, or torn.
A copy is never written to again: it outlives its epoch, and with a ledger its shard, and sequences go on from it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from millrace_router.scheduler.block_ledger import BlockLedger
from millrace_router.scheduler.step_plan import Row, StepPlan

INTERVAL = 128
"""Tokens between copies in a prompt, unless they would take too many pages: the most of a prefix that is lost."""
PART_OF_PAGES = 8
"""A prompt takes copies into at most this part of all pages, or into four."""


@dataclass(slots=True, eq=False)
class _Working:
    """The page of a running sequence."""

    page: int
    positions: frozenset[int]
    """Positions of the prompt at which copies are wanted."""
    latest: bytes | None = None
    """Key of the last copy that was taken while it decodes, which the next one replaces."""


class StatePages:
    """Hands out pages to sequences and for copies; the least recently used copies give way to sequences.

    Invariant: free + working + copies + copies in flight = num_pages - 1 (page 0 is never handed out). The shards run
    steps in order, so that a page may be named by a later step as soon as its sequence is dropped or its copy is not
    needed; pages of sequences come back with their slots, once the steps that name them are answered.

    In the ledger and in the shards' directories pages are numbered from `first` on, behind all blocks.
    """

    def __init__(
        self, num_pages: int, block_size: int, *, first: int = 0, ledger: BlockLedger | None = None
    ) -> None:
        if num_pages < 2:
            raise ValueError(f"no page to hand out: {num_pages=}")
        self.num_pages = num_pages - 1
        self._size = block_size
        self._first = first
        self._ledger = ledger
        self._free = list(range(self.num_pages, 0, -1))
        self._working: dict[int, _Working] = {}
        """By slot."""
        self._copies: OrderedDict[bytes, int] = OrderedDict()
        """Pages by the key of the block that ends where the copy was taken; the least recently used first."""

    @property
    def num_available(self) -> int:
        """Pages that sequences can have now."""
        return len(self._free) + len(self._copies)

    @property
    def num_working(self) -> int:
        return len(self._working)

    @property
    def num_copies(self) -> int:
        return len(self._copies)

    def depth(self, keys: Sequence[bytes]) -> int:
        """The most blocks of the chain `keys` after which there is a copy of the state."""
        return next((n for n in range(len(keys), 0, -1) if keys[n - 1] in self._copies), 0)

    def admit(self, row: Row, hits: Sequence[bytes], *, num_matched: int) -> None:
        """Give `row` a page, with the copy after the chain `hits` if there are any.

        `num_matched` blocks of its prompt are cached, perhaps more than `hits`: where sequences part, a copy serves the
        next one. Raises ValueError: no page is available, or its slot has one.
        """
        if row.slot in self._working or not self.num_available:
            raise ValueError(f"no page of states for slot {row.slot}")
        if hits:
            row.restored_page = self._copies[hits[-1]]
            self._copies.move_to_end(hits[-1])
        row.state_page = self._take(row.entry.request_id)
        positions = self._positions(row, num_matched * self._size)
        self._working[row.slot] = _Working(row.state_page, positions)

    def plan(self, plan: StepPlan, rows: Mapping[int, Row]) -> None:
        """Add the copies to `plan` that its rows are to take, while there are pages for them."""
        for slot, num_tokens in plan.chunks:
            end = rows[slot].num_prompt_planned
            for position in self._working[slot].positions:
                if end - num_tokens < position <= end:
                    self._save(plan, rows[slot], position)
        for slot in plan.decodes:
            row = rows[slot]
            if row.num_kv_tokens % self._size == 0 and not row.is_multi_token:
                self._save(plan, row, row.num_kv_tokens)

    def computed(
        self,
        plan: StepPlan,
        rows: tuple[Mapping[int, Row], Mapping[int, Row]],
        failed_slots: Container[int],
    ) -> None:
        """Make the copies of an answered plan findable. A slot is in at most one of `rows`."""
        running, preempted = rows
        for slot, position, page in plan.saves:
            row = running.get(slot) or preempted.get(slot)
            if row is None:
                self._free.append(page)
                continue
            keys = row.entry.block_keys(position // self._size)
            if slot in failed_slots:
                self._free.append(page)
                self._forget(keys)
            else:
                self._enter(slot, keys[-1], page, is_decoded=position > row.num_inputs)

    def release(self, slot: int) -> None:
        """Take back the page of `slot`."""
        working = self._working.pop(slot, None)
        if working is not None:
            self._free.append(working.page)

    def release_all(self) -> None:
        """Take back all pages of an ended epoch but for copies that answered steps have taken."""
        self._working.clear()
        self._hold_only_copies()

    def keys_by_page(self) -> dict[int, bytes]:
        """Return the key of each copy by the number of its page in the ledger."""
        return {self._first + page: key for key, page in self._copies.items()}

    def adopt(self, sealed: Mapping[int, bytes]) -> list[int]:
        """Take the copies among the `sealed` blocks and pages of a router that is gone; return their numbers."""
        numbers = range(self._first + 1, self._first + 1 + self.num_pages)
        # The last one of a key takes its place.
        self._copies.update(
            (key, number - self._first) for number, key in sealed.items() if number in numbers
        )
        self._hold_only_copies()
        return [*self.keys_by_page()]

    def _hold_only_copies(self) -> None:
        held = set(self._copies.values())
        self._free = [page for page in range(self.num_pages, 0, -1) if page not in held]

    def _positions(self, row: Row, matched: int) -> frozenset[int]:
        """Block ends in the prompt of `row`: the last one, where its prefix parts from others, and some between."""
        last, step = (row.num_inputs - 1) // self._size * self._size, max(self._size, INTERVAL)
        while last - row.num_cached > step * max(4, self.num_pages // PART_OF_PAGES):
            step *= 2
        first = (row.num_cached // step + 1) * step
        positions = (last, matched, *range(first, last, step))
        return frozenset(each for each in positions if each > row.num_cached)

    def _save(self, plan: StepPlan, row: Row, position: int) -> None:
        if self.num_available:
            plan.saves.append((row.slot, position, self._take(row.entry.request_id)))

    def _enter(self, slot: int, key: bytes, page: int, *, is_decoded: bool) -> None:
        if key in self._copies:
            self._free.append(page)
            return
        self._copies[key] = page
        if self._ledger is not None:
            self._ledger.seal(self._first + page, key)
        working = self._working.get(slot)
        if working is not None and is_decoded:
            if working.latest is not None:
                self._forget([working.latest])
            working.latest = key

    def _forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if (page := self._copies.pop(key, None)) is not None:
                self._free.append(page)
                if self._ledger is not None:
                    self._ledger.unseal(self._first + page)

    def _take(self, owner: int) -> int:
        """A page for the request `owner`, which the planned step writes to."""
        page = self._free.pop() if self._free else self._copies.popitem(last=False)[1]
        if self._ledger is not None:
            self._ledger.hand_out([self._first + page], owner)
        return page
