"""A checkpoint written as GGUF is the same model, but for the rounding of its blocks."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from bench.harness.checkpoints import Shape, write_checkpoint
from bench.quantized.gguf_writer import write_gguf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from millrace_shard.weights.gguf.files import GgufFiles
from millrace_shard.weights.gguf.folder import prepare_gguf

SMALL = Shape(
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
    vocab_size=20000,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_checkpoint(folder, SMALL, seed=1)
    return folder


def test_transformers_reads_the_same_weights(folder: Path, tmp_path: Path) -> None:
    write_gguf(folder, tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0)
    stored = load_file(folder / "model.safetensors")
    found = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").state_dict()
    for name, tensor in stored.items():
        wide, read = tensor.float(), found[name].float()
        assert torch.allclose(read, wide, atol=float(wide.abs().max()) / 120), name


def test_the_tokenizer_is_the_same(folder: Path, tmp_path: Path) -> None:
    write_gguf(folder, tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    ours = AutoTokenizer.from_pretrained(folder)
    text = " a few words zz qqq"
    assert theirs(text).input_ids == ours(text).input_ids


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_the_shard_reads_the_numbers_of_the_blocks(folder: Path, tmp_path: Path, kind: str) -> None:
    block_type = gguf.GGMLQuantizationType[kind]
    write_gguf(folder, tmp_path / "model.gguf", block_type)
    files = GgufFiles(prepare_gguf(tmp_path / "model.gguf", tmp_path / "cache", tokenizer=None))
    for name, tensor in load_file(folder / "model.safetensors").items():
        expected = tensor.float()
        if tensor.dim() > 1:
            blocks = gguf.quants.quantize(expected.numpy(), block_type)
            expected = torch.from_numpy(gguf.quants.dequantize(blocks, block_type))
        assert torch.equal(files.read(name, dim=0, span=(0, len(tensor))), expected), name
    files.close()
