"""Graphs of the chains in which a head drafts from hidden states, for each of a few batch sizes and lengths.

A chain is a small forward pass for each draft token, of which each reads the token and the result of the one before. A
graph is the whole chain: it reads the results of the rows' last step and the block tables itself. Rows with fewer
draft tokens than its length end as padding, and so do rows that there are not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from millrace_shard.batch.batch import Batch
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.device.transfers import upload_into
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.model_runner.capture_run import Candidate, CaptureRun
from millrace_shard.model_runner.graph_capture import Capture, Captured, GraphSettings
from millrace_shard.model_runner.trial_sequence import NUM_TOKENS, TrialSequence, trial_sequence
from millrace_shard.models.interface import CausalModel
from millrace_shard.speculation.hidden_state_heads import ChainRows, HeadProposer, TappedModel
from millrace_shard.speculation.proposer import Proposer

KIND = "CUDA graphs of draft chains"
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Draft tokens of the captured chains; a chain of a length between them goes on past its end, as padding."""
NUM_COLUMNS = len(ChainRows._fields)
LEAST_EQUAL = 0.75
"""The share of a replay's draft tokens that the eager pass drafts, too, with kernels that are not deterministic.

Where two tokens are nearly as likely, rounding decides, and the rest of the chain follows.
"""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """The graphs of one batch size, which read the same rows."""

    rows: Tensor
    """[NUM_COLUMNS, size] int64 on the device."""
    chains: dict[int, Captured]
    """By length, ascending: tokens [size, length] int64."""


class DraftGraphs:
    """Graphs over the tensors of one proposer and its batch, which never move. Call `capture` once."""

    def __init__(self, proposer: HeadProposer, batch: Batch, *, deterministic: bool) -> None:
        self._proposer, self._batch, self._deterministic = proposer, batch, deterministic
        most = batch.limits.max_draft_tokens
        self._lengths = sorted({min(length, most) for length in LENGTHS})
        num_places = NUM_COLUMNS * batch.limits.max_batch_size
        self._buffer = torch.zeros(num_places, dtype=torch.int64, device=batch.device)
        """The rows of every size at its beginning."""
        self._sizes: list[int] = []
        self._buckets: list[_Bucket] = []

    def capture(
        self,
        model: TappedModel,
        kernels: Kernels,
        cache: Sequence[LayerCache],
        settings: GraphSettings,
        group: ProcessGroup,
    ) -> None:
        """Capture the sizes of `settings` as far as possible, see DecodeGraphs.capture. `cache` is the model's."""
        sizes = settings.sizes_up_to(self._batch.limits.max_batch_size)
        if not sizes or not settings.may_capture(KIND):
            return
        run = CaptureRun(KIND, settings, group, self._batch.device)
        with trial_sequence(model, kernels, cache, self._batch) as trial:
            states = model.take()
            assert states is not None, "a tapped model keeps states"
            slot = self._batch.to_device(self._batch.blocks.of(0).astype(np.int64))
            self._proposer.clear_blocks(slot)
            buckets = run.capture(sizes, partial(self._candidate, trial, states.clone()))
        self._sizes = sorted(buckets)
        self._buckets = [buckets[size] for size in self._sizes]

    def drafts(self, rows: ChainRows) -> Tensor | None:
        """Replay the smallest graph with these rows and lengths, see Chains."""
        longest = int(rows.counts.max())
        if not self._sizes or len(rows.slots) > self._sizes[-1] or longest > self._lengths[-1]:
            return None
        bucket = self._buckets[bisect_left(self._sizes, len(rows.slots))]
        # The graph reads the tables on the device, which may lack the blocks of this step.
        changes = self._batch.blocks.take_changes()
        if len(changes):
            self._batch.blocks.change(self._batch.to_device(changes))
        self._load(bucket.rows, rows)
        length = self._lengths[bisect_left(self._lengths, longest)]
        return bucket.chains[length].replay()[: len(rows.slots)]

    def _load(self, out: Tensor, rows: ChainRows | None) -> None:
        """Overwrite `out` [NUM_COLUMNS, size] with `rows`, and padding after them."""
        padded = np.empty(tuple(out.shape), dtype=np.int64)
        padded[:] = [[self._batch.padding_slot], [0], [1], [1]]
        if rows is not None:
            padded[:, : len(rows.slots)] = rows
        upload_into(out, padded)

    def _candidate(
        self, trial: TrialSequence, states: Tensor, capture: Capture, size: int
    ) -> Candidate[_Bucket]:
        rows = self._buffer[: NUM_COLUMNS * size].view(NUM_COLUMNS, size)
        self._load(rows, None)
        chains = {length: partial(self._proposer.chain, rows, length) for length in self._lengths}

        def warm_up() -> None:
            for chain in chains.values():
                capture.warm_up(chain)

        return Candidate(
            warm_up,
            record=lambda: _Bucket(
                rows, {length: capture.record(chain) for length, chain in chains.items()}
            ),
            compare=partial(self._compare, trial, states),
        )

    def _compare(self, trial: TrialSequence, states: Tensor, bucket: _Bucket) -> None:
        """Raise RuntimeError if a replay drafts other tokens than the eager pass, from other results than captured."""
        for length, chain in bucket.chains.items():
            rows = self._trial_rows(trial, bucket.rows.shape[1], length)
            self._load(bucket.rows, rows)
            drafted = []
            for draft in (partial(self._proposer.draft, rows), chain.replay):
                # Chains overwrite keys and values of the sequence, which others read.
                self._proposer.rehearse(trial.last(NUM_TOKENS, self._batch), states.clone())
                drafted.append(draft().clone())
            eager, replayed = drafted
            counts = self._batch.to_device(rows.counts)
            steps = torch.arange(eager.shape[1], device=eager.device)
            equal = (eager == replayed[:, : len(steps)])[steps < counts[:, None]]
            if float(equal.float().mean()) < (1 if self._deterministic else LEAST_EQUAL):
                raise RuntimeError(
                    f"with {len(counts)} rows and {length} draft tokens, a replay drafts other tokens"
                )

    def _trial_rows(self, trial: TrialSequence, size: int, length: int) -> ChainRows:
        """Rows of slot 0 that end all over the sequence; rows with one end have the same results."""
        slots, positions = trial.rows(size)
        ends = np.maximum(1, positions + 2 - length)
        # The first position is the sequence's last.
        counts = np.minimum(length - np.arange(size) % length, positions[0] + 2 - ends)
        num_places = 1 + self._batch.limits.max_draft_tokens
        return ChainRows(slots, ends % num_places, ends, counts)


def capture_drafts(
    proposer: Proposer | None,
    model: CausalModel,
    kernels: Kernels,
    cache: Sequence[LayerCache],
    batch: Batch,
    settings: GraphSettings,
    group: ProcessGroup,
) -> None:
    """Let `proposer` replay its chains, if it is one with a head, for the tapped `model`, whose cache is `cache`.

    This is a collective. The batch must be empty. Raises CollectiveError, and any error of the eager pass.
    """
    if isinstance(proposer, HeadProposer):
        assert isinstance(model, TappedModel), "a head reads the states of a tapped model"
        graphs = DraftGraphs(proposer, batch, deterministic=kernels.deterministic)
        graphs.capture(model, kernels, cache, settings, group)
        proposer.chains = graphs
