"""Checkpoints that are made up: the tensors of a real one, in a file that the library reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench.gpu.engine.checkpoint import num_bytes, temporary_checkpoint, write_weights
from bench.gpu.engine.random_weights import RandomWeights
from bench.gpu.engine.scale import TINY
from bench.harness.checkpoints import EMBEDDING, describe, tensor_shapes, write_checkpoint
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from millrace_shard.errors import WeightsError

CPU = torch.device("cpu")


def test_the_tensors_are_those_of_the_benchmarks_checkpoints(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY, seed=0)
    real = load_file(tmp_path / "model.safetensors")
    assert tensor_shapes(TINY) == {name: tuple(tensor.shape) for name, tensor in real.items()}


def test_the_file_is_read_by_the_library_and_by_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / "model.safetensors"
    write_weights(path, TINY, CPU)
    describe(tmp_path, TINY)
    found = load_file(path)
    assert {name: tuple(t.shape) for name, t in found.items()} == tensor_shapes(TINY)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert sum(tensor.nbytes for tensor in found.values()) == num_bytes(TINY)
    embedding = found[EMBEDDING].float()
    assert not embedding[0].any()
    assert embedding[1:].std().item() == pytest.approx(0.02, rel=0.05)
    assert (found["model.layers.1.input_layernorm.weight"] == 1).all()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    loaded = dict(model.named_parameters())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in found.items())


def test_a_temporary_checkpoint_goes_with_its_block() -> None:
    with temporary_checkpoint(TINY, CPU) as folder:
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
            path.name for path in folder.iterdir()
        }
    assert not folder.exists()


def test_random_weights_know_the_shapes_they_are_asked_for() -> None:
    weights = RandomWeights(TINY, dtype=torch.bfloat16, device=CPU)
    assert "model.norm.weight" in weights
    assert "lm_head.weight" not in weights
    assert weights.replicated("model.norm.weight", TINY.hidden_size).eq(1).all()
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        weights.replicated("model.norm.weight", TINY.hidden_size + 1)
    with pytest.raises(WeightsError, match=r"lm_head\.weight"):
        weights.replicated("lm_head.weight", 4)
