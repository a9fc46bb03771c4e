"""Steps that fit no graph of a whole step: they replay pieces, or run eagerly where they are too large for these."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from millrace_shard.batch.step import Forward
from millrace_shard.model_runner import graph_capture, piecewise_layers
from millrace_shard.model_runner.graph_capture import GraphSettings
from millrace_testing.engines.graphs import Recorder
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.engines.multi_token import PlannedProposer
from millrace_testing.engines.steps import MAX_BATCH_SIZE, Stepper, ints, tiny_llama
from millrace_testing.models.models import prompt_of

FP32 = torch.float32
SIZES = (1, 2, 4)
TOKEN_COUNTS = (16, 8)
NUM_DRAFTS = 2


@dataclass(frozen=True)
class Steppers:
    """One stepper with all kinds of graphs and one with none, with the same proposer and sequences."""

    by_graph: Stepper
    eager: Stepper
    whole: Recorder
    pieces: Recorder

    def run(self, step: Forward) -> tuple[dict[int, int], dict[int, int]]:
        """Run a step in both; the replays of graphs of whole steps and of pieces in it, by size."""
        recorders = (self.whole, self.pieces)
        before = [Counter(recorder.replays()) for recorder in recorders]
        ours, theirs = self.by_graph.run(step), self.eager.run(step)
        assert len(ours.ids)
        assert ours.slots.tolist() == theirs.slots.tolist()
        assert ours.counts.tolist() == theirs.counts.tolist()
        assert ours.ids.tolist() == theirs.ids.tolist()
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5, rtol=0)
        whole, pieces = (
            dict(Counter(recorder.replays()) - old)
            for recorder, old in zip(recorders, before, strict=True)
        )
        return whole, pieces


@pytest.fixture
def steppers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Steppers:
    monkeypatch.setattr(graph_capture, "SIZES", SIZES)
    monkeypatch.setattr(piecewise_layers, "TOKEN_COUNTS", TOKEN_COUNTS)
    kernels = make_kernels("plain", deterministic=False)
    model = tiny_llama(tmp_path, kernels, FP32)
    whole, pieces = Recorder(), Recorder()
    by_graph = Stepper(
        model,
        kernels,
        dtype=FP32,
        graphs=GraphSettings(None, whole.new_capture),
        pieces=GraphSettings(None, pieces.new_capture),
        max_draft_tokens=NUM_DRAFTS,
    )
    eager = Stepper(model, kernels, dtype=FP32, max_draft_tokens=NUM_DRAFTS)
    for stepper in (by_graph, eager):
        futures = {slot: [1] * 99 for slot in range(MAX_BATCH_SIZE)}
        stepper.use(PlannedProposer(futures, error_rate=0.0))
        for slot in range(MAX_BATCH_SIZE):
            stepper.run(stepper.admission(slot, prompt_of(3 + slot, seed=slot)))
    return Steppers(by_graph, eager, whole, pieces)


def decodes(num_rows: int) -> Forward:
    return Forward(decode_slots=ints(range(num_rows)))


def drafts(num_rows: int) -> Forward:
    return Forward(
        decode_slots=ints(range(num_rows)),
        decode_tokens=ints([1 + NUM_DRAFTS] * num_rows),
        draft_tokens=ints([NUM_DRAFTS] * num_rows),
    )


def test_graphs_of_whole_steps_end_at_256_rows_and_pieces_at_512_tokens() -> None:
    assert GraphSettings(None, Recorder).sizes_up_to(1000)[0] == 256
    assert max(piecewise_layers.TOKEN_COUNTS) == 512


@pytest.mark.parametrize(
    ("step", "whole", "size"),
    [
        (decodes(4), {4: 1}, None),
        (decodes(5), {}, 8),
        (drafts(2), {}, 8),
        (drafts(4), {}, 16),
        (drafts(MAX_BATCH_SIZE), {}, None),
    ],
    ids=["decodes", "many-decodes", "drafts", "more-drafts", "most-drafts"],
)
def test_steps_without_a_graph_of_their_own(
    steppers: Steppers, step: Forward, whole: dict[int, int], size: int | None
) -> None:
    """Each size of pieces is counted once, although a step replays all pieces of a size."""
    replayed = steppers.run(step)
    assert replayed == (whole, {} if size is None else {size: 1})
    # Sequences go on from what the step stored.
    assert steppers.run(decodes(MAX_BATCH_SIZE)) == ({}, {8: 1})
