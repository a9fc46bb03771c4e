"""The sampled tokens of a launched step on their way to the host, where draft tokens are verified.

A row samples after its last known token and after each draft token, each time from its own logits with its own uniform
random number, as without drafts. A sample counts if all draft tokens before it equal the samples in their places. So
draft tokens never change the output: this is the exact case of Leviathan et al. 2023, "Fast Inference from
Transformers via Speculative Decoding", for draws that are a function of seed and position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from millrace_shard.arrays import Flags, Floats, Ints, no_ints
from millrace_shard.batch.step_layout import StepLayout
from millrace_shard.device.stopwatch import Stopwatch
from millrace_shard.device.transfers import start_download_of_words, start_downloads, upload
from millrace_shard.sampling.sampler import Sampled

ForcedTokens = Mapping[int, tuple[int, ...]]
"""Jump-forward tokens that a grammar forces on a row, by the row's place among the rows that sample."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Emitted:
    """The N tokens that the Y sampling rows yield, on the host."""

    some_failed: bool
    """Whether any row has failed."""
    failed: Flags
    """[Y], rows without finite logits: they yield no token."""
    counts: Ints
    """[Y], tokens of each row."""
    ends: Ints
    """[Y], the end of each row's tokens among all tokens."""
    rows: Ints
    """[N], the row of each token."""
    positions: Ints
    """[N], the position of each token in its sequence."""
    sources: Ints
    """[N], the place of each token among the R sampled positions; -1 for a forced token."""
    ids: Ints
    """[N]."""
    logprobs: Floats
    """[N]."""


class StepTokens:
    """Created when its step is launched; reading waits until the step is done. Any thread may read."""

    def __init__(
        self,
        layout: StepLayout,
        sampled: Sampled,
        watch: Stopwatch,
        *,
        expected: Tensor | None = None,
        forced: ForcedTokens | None = None,
    ) -> None:
        """Start to copy `sampled` and the `expected` samples to the host; `watch` measures the step."""
        self.layout = layout
        self.forced: ForcedTokens = forced or {}
        self.failure_reasons: Mapping[int, str] = {}
        """The reason for each slot whose grammar no token can follow."""
        self.num_open: Mapping[int, int] = {}
        """The tokens of a row before those that close its text, for rows that are closed."""
        self._watch = watch
        self._has_drafts = expected is not None
        if sampled.words is not None and expected is None:
            self._columns = start_download_of_words(sampled.words)
            return
        columns = [sampled.ids, sampled.logprobs, sampled.failed]
        if expected is not None:
            columns.append(expected)
        self._columns = start_downloads(columns)

    def is_done(self) -> bool:
        """Whether reading would not wait."""
        return self._watch.is_done()

    @cached_property
    def unverified(self) -> Ints:
        """Rows with draft tokens that decide their count of tokens; places among the rows that sample."""
        if not self._has_drafts:
            return no_ints()
        drafted = self.layout.num_samples > 1
        drafted[list(self.forced)] = False
        return np.flatnonzero(drafted)

    def num_known(self) -> Ints:
        """[Y], tokens of each row; 0 for rows with draft tokens, whose count is not known yet."""
        counts = np.ones(len(self.layout.yields), dtype=np.int64)
        for row, tokens in self.forced.items():
            counts[row] = len(tokens)
        if self._has_drafts:
            counts[self.unverified] = 0
        return counts

    def of_row(self, row: int) -> list[int]:
        """The tokens of one sampling row. Waits as `emitted` does."""
        emitted = self.emitted
        end = emitted.ends[row]
        tokens: list[int] = emitted.ids[end - emitted.counts[row] : end].tolist()
        return tokens

    @cached_property
    def emitted(self) -> Emitted:
        """All tokens. Waits for the device without the interpreter lock."""
        self._watch.wait()
        ids, logprobs, failed_samples, *expected = (column.numpy() for column in self._columns)
        layout, num_samples = self.layout, self.layout.num_samples
        some_failed = bool(failed_samples.any())
        if not (self._has_drafts or self.forced or some_failed):
            return _one_each(layout, ids.astype(np.int64, copy=False), logprobs)
        firsts = num_samples.cumsum() - num_samples
        counts = np.ones(len(num_samples), dtype=np.int64)
        if self._has_drafts:
            counts = num_accepted(ids, expected[0], num_samples)
        for row, tokens in self.forced.items():
            counts[row] = len(tokens)
        failed = failed_samples[firsts] != 0
        counts[failed] = 0
        ends = counts.cumsum()
        rows = np.repeat(np.arange(len(counts)), counts)
        offsets = np.arange(len(rows)) - np.repeat(ends - counts, counts)
        sources = firsts[rows] + offsets
        positions = layout.sampling.positions[firsts[rows]] + offsets
        is_forced = None
        if self.forced:
            is_forced = np.isin(rows, list(self.forced))
            sources[is_forced] = -1
        chosen, chosen_logprobs = ids[sources].astype(np.int64), logprobs[sources]
        if is_forced is not None:
            chosen_logprobs[is_forced] = 0.0
            chosen[is_forced] = [
                id_ for row, tokens in sorted(self.forced.items()) if counts[row] for id_ in tokens
            ]
        return Emitted(
            some_failed=some_failed,
            failed=failed,
            counts=counts,
            ends=ends,
            rows=rows,
            positions=positions,
            sources=sources,
            ids=chosen,
            logprobs=chosen_logprobs,
        )


def _one_each(layout: StepLayout, ids: Ints, logprobs: Floats) -> Emitted:
    """One token for each row."""
    rows = np.arange(len(ids))
    return Emitted(
        some_failed=False,
        failed=np.zeros(len(ids), dtype=np.bool_),
        counts=np.ones(len(ids), dtype=np.int64),
        ends=rows + 1,
        rows=rows,
        positions=layout.sampling.positions,
        sources=rows,
        ids=ids,
        logprobs=logprobs,
    )


def expected(layout: StepLayout, draft_ids: Tensor) -> Tensor:
    """[R] int32 on the device: the draft token that each sample must equal so that the next one counts, or -1."""
    num_samples = layout.num_samples
    whole = torch.full((len(layout.sampled),), -1, dtype=torch.int32, device=draft_ids.device)
    is_last = np.zeros(len(layout.sampled), dtype=np.bool_)
    is_last[num_samples.cumsum() - 1] = True
    index = upload(np.flatnonzero(~is_last), draft_ids.device)
    return whole.index_copy_(0, index, draft_ids.to(torch.int32))


def num_accepted(ids: Ints, expected: Ints, num_samples: Ints) -> Ints:
    """[Y], samples of each row that count: those before the first rejected draft token, and the one in its place.

    `ids` and `expected` [R] have all rows; row y has `num_samples[y]` samples, at least 1.
    """
    firsts = num_samples.cumsum() - num_samples
    offsets = np.arange(len(ids)) - np.repeat(firsts, num_samples)
    differing = np.where(ids != expected, offsets, len(ids))
    accepted: Ints = np.minimum.reduceat(differing, firsts) + 1
    return accepted


class PendingVerification:
    """Steps in the order of their launches. A row with unverified draft tokens has an unknown number of tokens."""

    def __init__(self, num_slots: int) -> None:
        self._steps: deque[StepTokens] = deque()
        self._num_added = 0
        self._last_unverified = np.zeros(num_slots, dtype=np.int64)
        """The last step with draft tokens of each slot, counted from 1."""
        self._last_sampled = np.zeros(num_slots, dtype=np.int64)
        """The last step that sampled for each slot."""

    def clear(self) -> None:
        self._steps.clear()

    def add(self, tokens: StepTokens) -> None:
        """Add a step that was launched."""
        self._num_added += 1
        self._steps.append(tokens)
        slots = tokens.layout.yield_slots
        self._last_sampled[slots] = self._num_added
        self._last_unverified[slots[tokens.unverified]] = self._num_added

    def due(self, counted: Ints, read: Ints) -> Iterator[StepTokens]:
        """Take, in order, the steps that are done, and the steps that have to be waited for.

        These are the steps with draft tokens of `counted` slots, and all steps of the slots to `read`.
        """
        if not self._steps:
            return
        until = max(
            int(self._last_unverified[counted].max(initial=0)),
            int(self._last_sampled[read].max(initial=0)),
        )
        while self._steps and (
            self._num_added - len(self._steps) < until or self._steps[0].is_done()
        ):
            yield self._steps.popleft()
