"""The choice of the tokens of decodes as graphs over the logits of other graphs, for rows that need few operations.

A graph also stores the tokens in the token table and reports earlier failures, so that a step of such rows submits
nothing else before its download. Rows have the bits that the eager sampler gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import torch
from torch import Tensor

from millrace_shard.batch.batch import Batch
from millrace_shard.device import transfers
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.device.transfers import as_words
from millrace_shard.kernels.scores import Best, choose_greedy
from millrace_shard.model_runner.capture_run import Candidate, CaptureRun
from millrace_shard.model_runner.graph_capture import Capture, Captured, GraphSettings
from millrace_shard.sampling.sampling_rows import tile_height
from millrace_shard.sampling.warpers import choose_plain

KIND = "CUDA graphs of the choice of tokens"
NUM_INPUTS = 4
"""Columns that graphs read: slots, positions of the computed tokens, positions of the tokens to choose, uniforms."""


class Choice(Enum):
    """Operations of a graph: every row is greedy, or some draw at their temperature from all tokens."""

    GREEDY = auto()
    PLAIN = auto()


@dataclass(frozen=True, slots=True)
class _Work:
    """Tensors of one batch size, which never move."""

    inputs: Tensor
    """[NUM_INPUTS, size] int64."""
    logits: Tensor
    """[size, vocab] float32."""


class TokenGraphs:
    """Graphs for the sizes and choices that could be captured."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._graphs: dict[Choice, dict[int, Captured]] = {}

    def capture(
        self,
        settings: GraphSettings,
        group: ProcessGroup,
        works: Mapping[int, tuple[Tensor, Tensor]],
    ) -> None:
        """Capture over the inputs and logits of each size in `works`. This is a collective. See DecodeGraphs.capture.

        On a device that computes at once, graphs would spare nothing.
        """
        self._graphs.clear()
        if transfers.is_synchronous(self._batch.device):
            return
        sizes = sorted(works, reverse=True)
        for choice in Choice:
            if sizes and settings.may_capture(KIND):
                run = CaptureRun(KIND, settings, group, self._batch.device)
                candidate = partial(self._candidate, choice, works)
                self._graphs[choice] = run.capture(sizes, candidate)
        if not settings.may_capture(KIND):
            self._graphs.clear()

    def replay(self, choice: Choice, size: int, num_rows: int) -> Tensor | None:
        """The chosen tokens [3, num_rows] int32: ids, bits of log probabilities, and whether a row has failed.

        They are valid until the next replay. None if there is no graph of `choice` for `size` rows.
        """
        graph = self._graphs.get(choice, {}).get(size)
        return None if graph is None else graph.replay()[:, :num_rows]

    def _candidate(
        self,
        choice: Choice,
        works: Mapping[int, tuple[Tensor, Tensor]],
        capture: Capture,
        size: int,
    ) -> Candidate[Captured]:
        work = _Work(*works[size])
        # All rows are padding, so that nothing that matters is overwritten.
        padding = torch.tensor([self._batch.padding_slot, 0, 1, 0], device=work.inputs.device)
        work.inputs.copy_(padding[:, None].expand_as(work.inputs))
        work.logits.zero_()
        compute = partial(self._choose, choice, work)
        return Candidate(
            warm_up=lambda: capture.warm_up(compute),
            record=lambda: capture.record(compute),
            compare=partial(_compare, work, compute),
        )

    def _choose(self, choice: Choice, work: _Work) -> Tensor:
        height = tile_height(work.logits.device, work.logits.shape[1])
        starts = range(0, len(work.logits), height)
        tiles = [
            _Work(work.inputs[:, start : start + height], work.logits[start : start + height])
            for start in starts
        ]
        parts = [self._choose_tile(choice, tile) for tile in tiles]
        ids, logprobs, failed = (
            columns[0] if len(columns) == 1 else torch.cat(columns)
            for columns in zip(*parts, strict=True)
        )
        slots, _, positions, _ = work.inputs
        self._batch.token_table.put(slots, positions, ids)
        return as_words([ids, logprobs, self._batch.failed.merge(slots, failed)])

    def _choose_tile(self, choice: Choice, work: _Work) -> Best:
        if choice is Choice.GREEDY:
            return choose_greedy(work.logits)
        slots, _, _, uniforms = work.inputs
        return choose_plain(work.logits, self._batch.parameters.words(slots), uniforms)


def _compare(work: _Work, compute: partial[Tensor], graph: Captured) -> None:
    """Raise RuntimeError if a replay differs from `compute` over other logits than captured."""
    values = torch.arange(work.logits.shape[1], device=work.logits.device) * 37 % 1009
    work.logits.copy_((values / 100).expand_as(work.logits))
    replayed = graph.replay().clone()
    if not torch.equal(replayed, compute()):
        raise RuntimeError(f"with {len(work.logits)} rows, a replay chooses other tokens")
