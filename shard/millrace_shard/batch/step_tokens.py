"""The tokens that a launched step has sampled, on their way to the host, where guesses turn out right or wrong.

A sequence is sampled at every position that was guessed, each from its own logits and with its own uniform, as if no
guess had been made. A sample counts as long as all guesses before it equal the samples in their place. So guessing
never changes a token: sample-and-compare, the exact case of Leviathan et al. 2023, "Fast Inference from Transformers
via Speculative Decoding", for draws that are a function of seed and position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from millrace_shard.arrays import Flags, Floats, Ints, no_ints
from millrace_shard.batch.step_layout import StepLayout
from millrace_shard.device.stopwatch import Stopwatch
from millrace_shard.device.transfers import start_downloads, upload
from millrace_shard.sampling.sampler import Sampled

Chains = Mapping[int, tuple[int, ...]]
"""Tokens that a grammar forces on a row, by its place among the rows that sample."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Emitted:
    """What the Y rows that sample yield, N tokens together; on the host."""

    some_failed: bool
    """Whether any of the rows failed."""
    failed: Flags
    """[Y], rows whose logits were not finite: they yield nothing."""
    counts: Ints
    """[Y], tokens of each row."""
    ends: Ints
    """[Y], where those of each row end among all."""
    rows: Ints
    """[N], the row of each token."""
    positions: Ints
    """[N], its place in its sequence."""
    sources: Ints
    """[N], which of the R sampled positions it comes from; -1 where it was forced."""
    ids: Ints
    """[N]."""
    logprobs: Floats
    """[N]."""


class StepTokens:
    """Made before the work of its step is done; reading waits for that. Any thread may read."""

    def __init__(
        self,
        prepared: StepLayout,
        sampled: Sampled,
        watch: Stopwatch,
        *,
        expected: Tensor | None = None,
        forced: Chains | None = None,
    ) -> None:
        """Begin to copy `sampled` and what was `expected` to the host; `watch` tells when the step is done."""
        self.prepared = prepared
        self.forced: Chains = forced or {}
        self.failure_reasons: Mapping[int, str] = {}
        """Of slots whose grammar could not be followed any further."""
        self._watch = watch
        self._has_guesses = expected is not None
        columns = [sampled.ids, sampled.logprobs, sampled.failed]
        if expected is not None:
            columns.append(expected)
        self._columns = start_downloads(columns)

    def is_done(self) -> bool:
        """Whether reading would not wait."""
        return self._watch.is_done()

    @cached_property
    def awaited(self) -> Ints:
        """Rows whose count of tokens depends on their guesses; places among the rows that sample."""
        if not self._has_guesses:
            return no_ints()
        guessed = self.prepared.num_samples > 1
        guessed[list(self.forced)] = False
        return np.flatnonzero(guessed)

    def num_known(self) -> Ints:
        """[Y], tokens of each row that do not depend on guesses; 0 where they do."""
        counts = np.ones(len(self.prepared.yields), dtype=np.int64)
        for row, chain in self.forced.items():
            counts[row] = len(chain)
        if self._has_guesses:
            counts[self.awaited] = 0
        return counts

    def of_row(self, row: int) -> list[int]:
        """The tokens of one of the rows that sample. Waits as `emitted` does."""
        emitted = self.emitted
        end = emitted.ends[row]
        tokens: list[int] = emitted.ids[end - emitted.counts[row] : end].tolist()
        return tokens

    @cached_property
    def emitted(self) -> Emitted:
        """All tokens. Waits for the device without holding the interpreter."""
        self._watch.wait()
        ids, logprobs, failed_samples, *expected = (column.numpy() for column in self._columns)
        prepared, num_samples = self.prepared, self.prepared.num_samples
        some_failed = bool(failed_samples.any())
        if not (self._has_guesses or self.forced or some_failed):
            return _one_each(prepared, ids.astype(np.int64, copy=False), logprobs)
        firsts = num_samples.cumsum() - num_samples
        counts = np.ones(len(num_samples), dtype=np.int64)
        if self._has_guesses:
            counts = num_accepted(ids, expected[0], num_samples)
        for row, chain in self.forced.items():
            counts[row] = len(chain)
        failed = failed_samples[firsts] != 0
        counts[failed] = 0
        ends = counts.cumsum()
        rows = np.repeat(np.arange(len(counts)), counts)
        offsets = np.arange(len(rows)) - np.repeat(ends - counts, counts)
        sources = firsts[rows] + offsets
        positions = prepared.sampling.positions[firsts[rows]] + offsets
        is_forced = None
        if self.forced:
            is_forced = np.isin(rows, list(self.forced))
            sources[is_forced] = -1
        chosen, chosen_logprobs = ids[sources].astype(np.int64), logprobs[sources]
        if is_forced is not None:
            chosen_logprobs[is_forced] = 0.0
            chosen[is_forced] = [
                id_ for row, chain in sorted(self.forced.items()) if counts[row] for id_ in chain
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


def _one_each(prepared: StepLayout, ids: Ints, logprobs: Floats) -> Emitted:
    """A token of each row."""
    rows = np.arange(len(ids))
    return Emitted(
        some_failed=False,
        failed=np.zeros(len(ids), dtype=np.bool_),
        counts=np.ones(len(ids), dtype=np.int64),
        ends=rows + 1,
        rows=rows,
        positions=prepared.sampling.positions,
        sources=rows,
        ids=ids,
        logprobs=logprobs,
    )


def expected(prepared: StepLayout, guesses: Tensor) -> Tensor:
    """[R] int32 on the device: the guess that each sample has to equal for the next one to count; -1 after the last."""
    num_samples = prepared.num_samples
    whole = torch.full((len(prepared.sampled),), -1, dtype=torch.int32, device=guesses.device)
    is_last = np.zeros(len(prepared.sampled), dtype=np.bool_)
    is_last[num_samples.cumsum() - 1] = True
    places = upload(np.flatnonzero(~is_last), guesses.device)
    return whole.index_copy_(0, places, guesses.to(torch.int32))


def num_accepted(ids: Ints, expected: Ints, num_samples: Ints) -> Ints:
    """Samples of each of Y rows that count, [Y]: those before the first guess that was wrong, and the one in its place.

    `ids` and what was `expected` of them [R] are those of all rows; row y has `num_samples[y]`, at least 1.
    """
    firsts = num_samples.cumsum() - num_samples
    offsets = np.arange(len(ids)) - np.repeat(firsts, num_samples)
    differing = np.where(ids != expected, offsets, len(ids))
    accepted: Ints = np.minimum.reduceat(differing, firsts) + 1
    return accepted
