"""The layout of a step on the host, before any of its data is on the device, and the draft tokens of its rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from millrace_shard.arrays import Flags, Ints, no_ints
from millrace_shard.device.transfers import upload
from millrace_shard.sampling.sampling_rows import SamplingRows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepLayout:
    """The rows of a forward pass with their draft tokens, and the columns that model and sampler need."""

    slots: Ints
    """[B], chunks first."""
    starts: Ints
    """[B], the first position that each row computes."""
    counts: Ints
    """[B], tokens that each row computes, draft tokens included."""
    num_drafts: Ints
    """[B], draft tokens at the end of each row."""
    logit_rows: Ints
    """[L = R + U], the tokens whose logits are needed, except those that only score a prompt: the R tokens to sample
    after, then the last tokens of the U rows with more to compute, so that both parts are slices."""
    num_chunks: int
    """Rows that compute a prompt."""
    yields: Ints
    """[Y], the rows that sample: one token after the last known token, and one after each draft token."""
    yield_slots: Ints
    """[Y], the slots of `yields`."""
    num_samples: Ints
    """[Y], positions that each of them samples."""
    admissions: Ints
    """[Y], the admission number of each sequence, which distinguishes it from later sequences in its slot."""
    max_new_tokens: Ints
    """[Y], tokens that each of them may yield."""
    sampled: Ints
    """[R], slots of the sampled positions; the positions of a row are adjacent."""
    sampling: SamplingRows
    unfinished: Ints
    """[U], slots of the rows with more to compute: the logits of their last tokens show whether they have failed."""
    pooled: Ints
    """[Q], slots of the rows whose complete prompt is pooled."""
    prompt_rows: Ints
    """[P], the rows whose prompt logprobs are requested."""
    state_rows: Ints
    """[S], the tokens whose hidden states are needed to score or pool prompts: `logit_rows`, the last tokens of
    `pooled`, and all tokens of `prompt_rows`."""
    logit_states: Ints
    """[L], the indexes of `logit_rows` in `state_rows`."""
    pooled_states: Ints
    """[Q], the indexes of the last tokens of `pooled` in `state_rows`."""
    prompt_states: Ints
    """The indexes of all tokens of `prompt_rows` in `state_rows`, in order."""
    prompt_targets: Ints
    """The position that each of these tokens predicts, clamped to the prompt."""
    is_plain: bool
    """Whether every row is a decode that computes and samples one position and may have no draft tokens."""

    @property
    def needs_states(self) -> bool:
        """Whether the step needs hidden states as well as logits."""
        return bool(len(self.prompt_rows) or len(self.pooled))

    def repeated(self, starts: Ints, max_new_tokens: Ints) -> StepLayout:
        """The same rows of a plain step at other positions; all other columns are shared."""
        return replace(
            self,
            starts=starts,
            max_new_tokens=max_new_tokens,
            sampling=replace(self.sampling, positions=starts + 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MultiTokenRows:
    """Decodes that may fill more than one position, including those at the greatest length."""

    slots: Ints = field(default_factory=no_ints)
    """[W]."""
    computed: Ints = field(default_factory=no_ints)
    """[W], KV positions that each has filled after this step, without draft tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRows:
    """B rows before their draft tokens are known, chunks first; decodes at the greatest length are left out."""

    slots: Ints
    """[B]."""
    num_chunks: int
    """Rows that compute a prompt."""
    starts: Ints
    """[B], the first position that each row computes."""
    counts: Ints
    """[B], tokens that each row computes: of its prompt, or sampled ones without KV."""
    finished: Flags
    """[B], whether a row computes all of its tokens, so that it samples."""
    pooled: Flags
    """[B], whether a row computes all of its tokens, so that it is pooled; it samples none."""
    max_draft_tokens: Ints
    """[B], draft tokens that each row may have in addition; 0 unless it is finished."""
    max_new_tokens: Ints
    """[B], tokens that each row may yield."""
    multi_token: MultiTokenRows

    @property
    def num_tokens(self) -> Ints:
        """[B], length of each sequence up to the last computed token, without draft tokens."""
        return self.starts + self.counts


def spread(starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Row and position, [T] each, of `counts[b]` consecutive tokens from position `starts[b]` on, for each row b."""
    rows = np.repeat(np.arange(len(counts)), counts)
    firsts = counts.cumsum() - counts
    return rows, np.arange(len(rows)) + (starts - firsts)[rows]


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftTokens:
    """G tokens that may follow the last tokens of B rows; the tokens of a row are adjacent."""

    counts: Ints
    """[B]."""
    ids: Tensor
    """[G] int64 on the device, within the vocabulary."""

    @classmethod
    def none(cls, num_rows: int, device: torch.device) -> DraftTokens:
        ids = torch.empty(0, dtype=torch.int64, device=device)
        return cls(counts=np.zeros(num_rows, dtype=np.int64), ids=ids)

    @classmethod
    def of(cls, rows: list[Ints], device: torch.device) -> DraftTokens:
        """The ids of each row, which may be empty."""
        counts = np.array([len(row) for row in rows], dtype=np.int64)
        ids = np.concatenate([*rows, np.empty(0, dtype=np.int64)])
        drafts = cls(counts=counts, ids=upload(ids, device))
        drafts.__dict__["host_ids"] = ids
        return drafts

    def __len__(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def host_ids(self) -> Ints:
        """[G] on the host; waits for the device that has computed the ids."""
        ids: Ints = self.ids.cpu().numpy()
        return ids

    def of_row(self, row: int) -> tuple[int, ...]:
        """The ids of one row, on the host."""
        end = int(self.counts[: row + 1].sum())
        return tuple(self.host_ids[end - int(self.counts[row]) : end].tolist())

    def table_index(self, slots: Ints, num_tokens: Ints) -> tuple[Ints, Ints]:
        """Slot and position of each draft token, where row b has `num_tokens[b]` tokens without them."""
        rows, positions = spread(num_tokens, self.counts)
        return slots[rows], positions
