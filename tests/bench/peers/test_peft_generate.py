"""A row of a mixed batch has the tokens that it has alone with its adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bench.harness.checkpoints import Shape, write_checkpoint
from bench.peers.peft_generate import AdaptedBatches
from bench.peers.worker import Request
from transformers import AutoModelForCausalLM

from millrace.verify.adapter_files import linears, write_adapter

SHAPE = Shape(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=18_600,
)
PROMPT = [500, 501, 502]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, SHAPE, seed=3)
    return folder


def strong_adapter(folder: Path, checkpoint: Path) -> str:
    """An adapter that changes the tokens."""
    write_adapter(folder, linears(checkpoint), rank=4)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 1000}))
    return str(folder)


# PEFT reads a deprecated property of the model.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_rows_have_their_own_adapters(checkpoint: Path, tmp_path: Path) -> None:
    adapters = ["", *(strong_adapter(tmp_path / name, checkpoint) for name in "ab")]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    batches = AdaptedBatches(model.eval())
    requests = [Request(PROMPT, 6, adapter) for adapter in adapters]
    (alone_without,) = batches.generate(requests[:1])
    together = batches.generate(requests)
    assert torch.equal(together[0], alone_without)
    for row, request in zip(together, requests, strict=True):
        (alone,) = batches.generate([request])
        assert torch.equal(row, alone)
    assert len({tuple(row.tolist()) for row in together}) == 3
