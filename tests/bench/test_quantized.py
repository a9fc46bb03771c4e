"""Each encoded format, read by the shard, has the numbers that the encoder has chosen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from bench.harness.checkpoints import Shape, write_checkpoint
from bench.quantized.formats import ENCODERS, GROUP, int4
from bench.quantized.gguf_writer import write_gguf
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from millrace_shard.weights.gguf.files import GgufFiles
from millrace_shard.weights.gguf.folder import prepare_gguf
from millrace_shard.weights.quantized.linear_reader import LinearReader
from millrace_shard.weights.quantized.module_tensors import Cut
from millrace_shard.weights.quantized.quantization_config import read_quantization
from millrace_shard.weights.safetensor_files import SafetensorFiles

NAME = "model.layers.0.mlp.up_proj"
OUTPUTS, INPUTS = 136, 2 * GROUP


def four_bits(weight: Tensor, _: dict[str, Tensor]) -> Tensor:
    codes, scales = int4(weight)
    return (codes - 8) * scales.float().repeat_interleave(GROUP, 1)


def eight_bits(_: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    return tensors[f"{NAME}.weight"].float() * tensors[f"{NAME}.weight_scale"].float()


NUMBERS: dict[str, tuple[Callable[[Tensor, dict[str, Tensor]], Tensor], float]] = {
    "compressed-int4": (four_bits, 1 / 15),
    "compressed-int8": (eight_bits, 1 / 127),
}
"""What the tensors stand for, and the largest error as a part of the largest weight of a group."""


@pytest.mark.parametrize("name", ENCODERS)
def test_the_shard_reads_the_numbers_of_the_encoder(name: str, tmp_path: Path) -> None:
    encode, config = ENCODERS[name]
    weight = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(2))
    tensors = encode(NAME, weight)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    quantization = read_quantization(tmp_path, None)
    assert quantization is not None
    reader = LinearReader(SafetensorFiles(tmp_path), quantization, lambda *_: None)
    found = reader.read(
        f"{NAME}.weight",
        Cut(outputs=OUTPUTS, inputs=INPUTS, rows=(0, OUTPUTS), columns=(0, INPUTS)),
    )
    assert found is not None
    numbers, error = NUMBERS[name]
    assert torch.equal(found.dequantized(), numbers(weight, tensors))
    # Scales are rounded, too.
    largest = weight.abs().view(OUTPUTS, -1, GROUP).amax(2).repeat_interleave(GROUP, 1)
    largest = weight.abs().amax() if name == "compressed-int8" else largest
    assert ((found.dequantized() - weight).abs() <= 1.02 * error * largest).all()


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
