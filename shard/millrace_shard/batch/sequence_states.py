"""The pages in which the sequences of a batch have the states of recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from millrace_shard.arrays import Ints, no_ints
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.step_layout import spread
from millrace_shard.device.transfers import upload_columns
from millrace_shard.errors import StepInvalid
from millrace_shard.kernels.kv_store import KVStore
from millrace_shard.kernels.states import LayerState, Replay, StateRows


@dataclass(frozen=True, slots=True, eq=False)
class StateSaves:
    """Columns of a step: states that are copied while it runs."""

    slots: Ints
    positions: Ints
    """The number of tokens after which each slot has the state; the step computes the last of them."""
    pages: Ints
    """Where the copies go."""


NO_SAVES = StateSaves(no_ints(), no_ints(), no_ints())


class DraftedStates:
    """The way back from rejected draft tokens, for models whose states go forward only.

    A step with draft tokens saves the state before them to a second page, with which the sequence goes on: what is in
    the first one then means nothing. The inputs of the draft tokens are in a log. The next step begins with those that
    were accepted.
    """

    def __init__(
        self, num_slots: int, layers: tuple[LayerState, ...], pages: range, most: int
    ) -> None:
        """`pages` are second pages, one for each sequence; a step has at most `most` draft tokens of a sequence."""
        self._most, self._pages = most, pages
        self._free = list(pages)
        self._lent, self._second, self._computed, self._logged = np.zeros(
            (4, num_slots + 1), dtype=np.int64
        )
        """By slot: its page of `pages`, the one of its two without meaning, the tokens of its state, and the draft
        tokens of its last step."""
        self._logs = tuple(
            layer.conv.new_empty(num_slots * most, layer.conv.shape[2] + layer.other_inputs)
            for layer in layers
        )

    def clear(self) -> None:
        self._free = list(self._pages)
        self._lent[:] = 0

    def admit(self, slot: int, num_tokens: int) -> None:
        """Give `slot`, whose state has `num_tokens`, a second page."""
        self._lent[slot] = self._second[slot] = self._free.pop()
        self._computed[slot], self._logged[slot] = num_tokens, 0

    def drop(self, slots: Ints) -> None:
        """Take back second pages; invalid sequences have none."""
        held = slots[self._lent[slots] > 0]
        self._free += self._lent[held].tolist()
        self._lent[held] = 0

    def earlier(self, slots: Ints, starts: Ints) -> Ints:
        """[B], accepted draft tokens that the states of `slots` lack before `starts` [B]. Raises StepInvalid."""
        logged = self._logged[slots]
        missing = np.where(logged > 0, starts - self._computed[slots], 0)
        if ((missing < 0) | (missing > logged)).any():
            raise StepInvalid("a sequence does not go on after its accepted draft tokens")
        return missing

    def exchange(self, slots: Ints, pages: Ints) -> Ints:
        """The second pages of `slots` [n], which get `pages` instead."""
        second: Ints = self._second[slots]
        self._second[slots] = pages
        return second

    def advance(self, slots: Ints, ends: Ints, num_drafts: Ints) -> None:
        """The states of `slots` [B] have the tokens before `ends` [B], after which draft tokens were computed."""
        self._computed[slots], self._logged[slots] = ends, num_drafts

    def replay(
        self, slots: Ints, counts: Ints, earlier: Ints, num_drafts: Ints, device: torch.device
    ) -> Replay:
        """A step of `counts` [B] tokens, of which `num_drafts` are draft tokens, after `earlier` ones."""
        rows, offsets = spread(np.zeros_like(counts), earlier + counts)
        is_own = offsets >= earlier[rows]
        own, before = np.flatnonzero(is_own), np.flatnonzero(~is_own)
        sources = np.empty_like(offsets)
        sources[own] = np.arange(len(own))
        sources[before] = len(own) + np.arange(len(before))
        read = slots[rows[before]] * self._most + offsets[before]
        firsts = counts.cumsum() - num_drafts
        draft_rows, drafts = spread(firsts, num_drafts)
        written = slots[draft_rows] * self._most + drafts - firsts[draft_rows]
        starts = np.concatenate([[0], (earlier + counts).cumsum()])
        columns = upload_columns([starts, sources, own, read, drafts, written], device)
        return Replay(
            query_starts=columns[0].to(torch.int32),
            sources=columns[1],
            own=columns[2],
            logs=self._logs,
            read=columns[3],
            drafts=columns[4],
            written=columns[5],
        )


class SequenceStates:
    """A page for each slot. Page 0 belongs to no sequence; nothing is done for models without recurrent layers."""

    def __init__(
        self,
        num_slots: int,
        layers: tuple[LayerState, ...],
        device: torch.device,
        *,
        num_second: int = 0,
        max_draft_tokens: int = 0,
    ) -> None:
        """`layers` have equal numbers of pages, of which the last `num_second` are for steps with draft tokens."""
        self._layers = layers
        count = len(layers[0].conv) if layers else 0
        self._num_pages = count - num_second
        self._pages: Ints = np.zeros(num_slots + 1, dtype=np.int64)
        self._current: Ints = np.zeros(num_slots + 1, dtype=np.int64)
        """The page of each slot, or its second one."""
        self._drafted: DraftedStates | None = None
        if layers and max_draft_tokens:
            second = range(self._num_pages, count)
            self._drafted = DraftedStates(num_slots, layers, second, max_draft_tokens)
        self._saves = NO_SAVES
        self._device = device
        self._owners: Ints = np.zeros(num_slots + 1, dtype=np.int64)
        """Request ids by slot."""
        self._store: KVStore | None = None
        self._first = 0

    @property
    def num_pages(self) -> int:
        """Pages that the router numbers, with page 0; 0 without recurrent layers."""
        return self._num_pages

    def keep_in(self, store: KVStore, first: int) -> None:
        """Let the directory of `store`, where pages are numbered from `first` on, say whose each is."""
        self._store, self._first = store, first

    def _hand_out(self, pages: Ints, slots: Ints) -> None:
        """Have the directory forget what `pages` hold, before they are written to."""
        if self._store is not None and len(pages):
            self._store.hand_out(self._first + pages, self._owners[slots].tolist())

    def clear(self) -> None:
        self._pages[:] = 0
        self._saves = NO_SAVES
        if self._drafted is not None:
            self._drafted.clear()

    def drop(self, slots: Ints) -> None:
        self._pages[slots] = 0
        if self._drafted is not None:
            self._drafted.drop(slots)

    def check(self, sequence: Sequence) -> None:
        """Raise StepInvalid if the pages of `sequence` are not of this model."""
        if not self._layers:
            return
        for page in (sequence.state_page, sequence.restored_page):
            if page >= self._num_pages:
                raise StepInvalid(f"pages of states are numbered 1 to {self._num_pages - 1}")
        if not sequence.state_page:
            raise StepInvalid(f"request {sequence.request_id} has no page for its state")

    def admit(self, sequence: Sequence) -> None:
        """Begin a sequence with zeros, or with a copy of the state at its cached tokens. Raises StepInvalid."""
        if not self._layers:
            return
        page = sequence.state_page
        if (self._pages == page).any():
            raise StepInvalid(f"page {page} of states belongs to another sequence")
        self._pages[sequence.slot] = self._current[sequence.slot] = page
        if self._drafted is not None:
            self._drafted.admit(sequence.slot, sequence.cached_tokens)
        self._owners[sequence.slot] = sequence.request_id
        self._hand_out(np.array([page]), np.array([sequence.slot]))
        for layer in self._layers:
            if sequence.restored_page:
                layer.copy(sequence.restored_page, page)
            else:
                layer.zero(page)

    def save(self, saves: StateSaves) -> None:
        """Let the next step, which `rows` describes, copy states. Raises StepInvalid."""
        lengths = {len(each) for each in (saves.slots, saves.positions, saves.pages)}
        pages = saves.pages
        is_known = not len(pages) or (pages.min() > 0 and pages.max() < self._num_pages)
        if len(lengths) > 1 or not is_known or np.isin(pages, self._pages).any():
            raise StepInvalid("a state is to be saved in a page that is not free")
        self._hand_out(pages, saves.slots)
        self._saves = saves

    def rows(
        self,
        slots: Ints,
        starts: Ints,
        counts: Ints | None = None,
        num_drafts: Ints | None = None,
    ) -> StateRows | None:
        """The pages of `counts` [B] tokens, or one each, of `slots` [B] from positions `starts` [B] on.

        The last `num_drafts` [B] of them are draft tokens, or none. Raises StepInvalid.
        """
        if not self._layers:
            return None
        if counts is None:
            counts = np.ones_like(starts)
        if num_drafts is None:
            num_drafts = np.zeros_like(starts)
        earlier, drafted = np.zeros_like(starts), self._drafted
        if drafted is not None:
            earlier = drafted.earlier(slots, starts)
        saves, self._saves = self._saves, NO_SAVES
        saved, pages = no_ints(), self._current[slots]
        if len(saves.slots):
            saved = _tokens(saves, slots, starts - earlier, earlier + counts)
        replay = None
        if drafted is not None:
            drafted.advance(slots, starts + counts - num_drafts, num_drafts)
            if earlier.any() or num_drafts.any():
                saved = self._exchange(drafted, slots, earlier + counts, num_drafts, saved)
                replay = drafted.replay(slots, counts, earlier, num_drafts, self._device)
        own, saved_pages = upload_columns([pages, saved], self._device)
        return StateRows(layers=self._layers, pages=own, saved=saved_pages, replay=replay)

    def _exchange(
        self, drafted: DraftedStates, slots: Ints, counts: Ints, num_drafts: Ints, saved: Ints
    ) -> Ints:
        """`saved`, with the second pages of rows of `counts` [B] tokens of which some are draft tokens."""
        some = np.flatnonzero(num_drafts)
        if not len(some):
            return saved
        if not len(saved):
            saved = np.full(counts.sum(), -1, dtype=np.int64)
        own = slots[some]
        second = drafted.exchange(own, self._current[own])
        saved[(counts.cumsum() - num_drafts)[some] - 1] = second
        self._current[own] = second
        return saved


def _tokens(saves: StateSaves, slots: Ints, starts: Ints, counts: Ints) -> Ints:
    """For each token of a step the page to which the state after it is copied, or -1. Raises StepInvalid."""
    tokens = np.full(counts.sum(), -1, dtype=np.int64)
    firsts = dict(zip(slots.tolist(), (counts.cumsum() - counts).tolist(), strict=True))
    spans = dict(
        zip(slots.tolist(), zip(starts.tolist(), counts.tolist(), strict=True), strict=True)
    )
    columns = (each.tolist() for each in (saves.slots, saves.positions, saves.pages))
    for slot, position, page in zip(*columns, strict=True):
        if slot not in spans:
            # The row is invalid, and not computed.
            continue
        start, count = spans[slot]
        if not start < position <= start + count:
            raise StepInvalid(f"slot {slot} has no state at position {position} in this step")
        tokens[firsts[slot] + position - start - 1] = page
    return tokens
