"""Padded batches: a row's tokens are those that it has alone, and a batch ends for all its requests at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench.harness.checkpoints import Shape, write_checkpoint
from bench.peers.transformers_generate import PaddedBatches, left_padded
from bench.peers.worker import Request
from transformers import AutoModelForCausalLM, PreTrainedModel

SHAPE = Shape(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=18_600,
)
REQUESTS = [Request(list(range(500, 503 + n)), 3 + n) for n in range(5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(Path(folder), SHAPE, seed=3)
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return loaded.eval()


def test_prompts_are_padded_on_the_left() -> None:
    ids, mask = left_padded([[7], [8, 9, 10]])
    assert ids.tolist() == [[0, 0, 7], [8, 9, 10]]
    assert mask.tolist() == [[0, 0, 1], [1, 1, 1]]


def test_a_row_of_a_padded_batch_has_the_tokens_that_it_has_alone(model: PreTrainedModel) -> None:
    batches = PaddedBatches(model)
    together = batches.generate(REQUESTS)
    assert together.shape == (5, 7 + 7)
    for row, request in zip(together, REQUESTS, strict=True):
        (alone,) = batches.generate([request])
        num_new = request.new_tokens
        assert row[7 : 7 + num_new].tolist() == alone[len(request.ids) :].tolist()


def test_requests_have_their_own_lengths_and_the_end_of_their_batch(model: PreTrainedModel) -> None:
    moments = PaddedBatches(model).run(REQUESTS, 2)
    assert [len(each.arrivals) for each in moments] == [3, 4, 5, 6, 7]
    assert len({each.due for each in moments}) == 1
    ends = [each.arrivals[0] for each in moments]
    assert all(set(each.arrivals) == {end} for each, end in zip(moments, ends, strict=True))
    assert ends[0] == ends[1] < ends[2] == ends[3] < ends[4]
