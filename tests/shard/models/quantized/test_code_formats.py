"""Kernels are checked for the formats of the codes that the model then has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from millrace_shard.commands import chosen_kernels
from millrace_shard.config import ShardConfig
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.base import Kernels, Linear
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.layer_weights import LinearWeights
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.quantized import CodeFormat, QuantizedTensor
from millrace_shard.models.description import ModelDescription
from millrace_shard.models.load import load_model
from millrace_shard.models.quantized import code_formats
from millrace_shard.weights.gguf.folder import prepare_gguf
from millrace_shard.weights.quantized.made_at_load import METHODS
from millrace_testing.models.gguf_files import TinyGguf
from millrace_testing.models.models import CPU, save_tiny
from millrace_testing.quantized.checkpoints import save_mixed, save_quantized
from millrace_testing.quantized.linears import FORMATS

NUM_CODES = {method: {256} for method in METHODS}
NUM_CODES |= {"int4": {16, 256}, "bitsandbytes-nf4": {16}, "bitsandbytes-fp4": {16}}


class Recording(PlainKernels):
    """Plain kernels that keep the formats of codes they meet."""

    def __init__(self) -> None:
        super().__init__(deterministic=False)
        self.formats: set[CodeFormat] = set()

    def linear_from(self, weights: LinearWeights) -> Linear:
        self._keep(weights)
        return super().linear_from(weights)

    def head_from(self, weights: LinearWeights) -> Linear:
        self._keep(weights)
        return super().head_from(weights)

    def _keep(self, weights: LinearWeights) -> None:
        for part in weights.weight.parts:
            if isinstance(part, QuantizedTensor):
                self.formats.add(CodeFormat.of(part))


def loaded(
    folder: Path, quantize: str | None = None, group: ProcessGroup | None = None
) -> set[CodeFormat]:
    """The formats of the linears and the head of the model."""
    kernels = Recording()
    load_model(
        folder,
        dtype=torch.float32,
        kernels=kernels,
        group=group or ProcessGroup.single(),
        device=CPU,
        quantize=quantize,
    )
    return kernels.formats


def found(
    folder: Path, quantize: str | None = None, rank: int = 0, world_size: int = 1
) -> set[CodeFormat]:
    spec = ModelDescription.read(folder).spec
    assert spec is not None
    formats = code_formats(folder, spec, quantize=quantize, rank=rank, world_size=world_size)
    assert len(set(formats)) == len(formats)
    return set(formats)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_checkpoints_match_the_loaded_weights(name: str, tmp_path: Path) -> None:
    save_quantized(tmp_path, "llama", name, num_hidden_layers=1)
    formats = found(tmp_path)
    assert formats
    assert formats == loaded(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_have_groups_of_their_own(rank: int, tmp_path: Path) -> None:
    """64 of 128 inputs end inside a group of 48."""
    save_quantized(tmp_path, "llama", "fp8-block", num_hidden_layers=1)
    formats = found(tmp_path, rank=rank, world_size=2)
    assert {each.group_size for each in formats} == {48, None} if rank == 0 else {48, 16}
    assert formats == loaded(tmp_path, group=ProcessGroup(rank, 2, CPU))


def test_formats_of_single_modules_match_the_loaded_weights(tmp_path: Path) -> None:
    parts = {"q_proj": FORMATS["pack-quantized"], "down_proj": FORMATS["int-quantized"], "": None}
    groups = {
        f"group_{number}": {
            **made.config["config_groups"]["group_0"],
            "targets": [f"re:.*{part}"],
            "format": made.config["format"],
        }
        for number, (part, made) in enumerate(parts.items())
        if made is not None
    }
    config = {**FORMATS["int-quantized"].config, "config_groups": groups}
    save_mixed(tmp_path, "llama", parts, config)
    assert len(found(tmp_path)) == 2
    assert found(tmp_path) == loaded(tmp_path)


@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q4_K", "Q6_K"])
def test_formats_of_gguf_files_match_the_loaded_weights(kind: str, tmp_path: Path) -> None:
    made = TinyGguf("llama", kind, num_hidden_layers=1)
    folder = prepare_gguf(made.write(tmp_path / "m.gguf"), tmp_path, tokenizer=None)
    assert len(found(folder)) == (kind != "F16")
    assert found(folder) == loaded(folder)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tied", [False, True])
def test_weights_quantised_at_load(method: str, tied: bool, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", tie_word_embeddings=tied)
    formats = found(tmp_path, method)
    assert {len(each.values) for each in formats} == NUM_CODES[method]
    assert formats == loaded(tmp_path, method)


@pytest.mark.parametrize("family", ["qwen2_moe", "phi3"])
def test_plain_weights_have_none(family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, family)
    assert found(tmp_path) == set()


def test_kernels_for_cuda_are_checked_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_quantized(tmp_path, "llama", "awq")
    shapes = list[LayerShape]()

    def choose(*_: Any, shapes: tuple[LayerShape, ...], **__: Any) -> Kernels:
        kept.extend(shapes)
        return PlainKernels(deterministic=True)

    kept = shapes
    monkeypatch.setattr(chosen_kernels, "choose_kernels", choose)
    config = ShardConfig.from_args([str(tmp_path)])
    for device in (torch.device("cuda"), CPU):
        chosen_kernels.chosen_kernels(config, device, torch.bfloat16)
    on_cuda, on_cpu = shapes
    assert set(on_cuda.formats) == loaded(tmp_path)
    assert on_cpu.formats == ()
