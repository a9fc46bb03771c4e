from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import UnsupportedModel, WeightsError
from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_shard.weights.quantized.linear_reader import LinearReader
from millrace_shard.weights.quantized.module_tensors import Cut, Span
from millrace_shard.weights.quantized.quantization_config import read_quantization
from millrace_shard.weights.safetensor_files import SafetensorFiles
from millrace_shard.weights.weights import Weights
from millrace_testing.models.models import edit_json
from millrace_testing.quantized.linears import FORMATS

OUTPUTS, INPUTS = 72, 192
NAME = "model.layers.0.mlp.up_proj"
SCATTERED = ("gptq-desc-act", "pack-quantized-actorder")


def write(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    save_file(
        {f"{NAME}.{kind}": each for kind, each in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text("{}")
    edit_json(folder / "config.json", quantization_config=config)


def read(folder: Path, cut: Cut) -> QuantizedTensor:
    quantization = read_quantization(folder, None)
    assert quantization is not None
    views = []
    reader = LinearReader(SafetensorFiles(folder), quantization, lambda *view: views.append(view))
    result = reader.read(f"{NAME}.weight", cut)
    assert result is not None
    assert views
    return result


def part(rows: Span = (0, OUTPUTS), columns: Span = (0, INPUTS)) -> Cut:
    return Cut(outputs=OUTPUTS, inputs=INPUTS, rows=rows, columns=columns)


@pytest.mark.parametrize(
    ("name", "inputs", "expected"),
    [
        ("fp8-tensor", None, True),
        ("float-quantized", None, False),
        ("float-quantized", {"type": "float", "num_bits": 8, "dynamic": True}, True),
        ("float-quantized", {"type": "int", "num_bits": 8}, False),
    ],
)
def test_inputs_may_be_in_e4m3_where_the_format_has_them(
    tmp_path: Path, name: str, inputs: dict[str, Any] | None, expected: bool
) -> None:
    tensors, _ = FORMATS[name].pack(OUTPUTS, INPUTS, torch.Generator().manual_seed(1))
    config = copy.deepcopy(FORMATS[name].config)
    if inputs is not None:
        config["config_groups"]["group_0"]["input_activations"] = inputs
    write(tmp_path, tensors, config)
    assert read(tmp_path, part()).e4m3_inputs is expected


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_stands_for_its_number(tmp_path: Path, name: str) -> None:
    tensors, expected = FORMATS[name].pack(OUTPUTS, INPUTS, torch.Generator().manual_seed(1))
    write(tmp_path, tensors, FORMATS[name].config)
    assert torch.equal(read(tmp_path, part()).dequantized(), expected)


@pytest.mark.parametrize(
    ("name", "order"), [(SCATTERED[0], "desc_act"), (SCATTERED[1], "actorder")]
)
def test_scattered_inputs_count_though_the_config_denies_them(
    name: str, order: str, tmp_path: Path
) -> None:
    tensors, expected = FORMATS[name].pack(OUTPUTS, INPUTS, torch.Generator().manual_seed(1))
    config = copy.deepcopy(FORMATS[name].config)
    groups = config.get("config_groups", {"": {"weights": config}})
    for group in groups.values():
        group["weights"].pop(order)
    write(tmp_path, tensors, config)
    assert torch.equal(read(tmp_path, part()).dequantized(), expected)
    with pytest.raises(WeightsError, match="only one shard can serve this model"):
        read(tmp_path, part(columns=(0, 96)))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [(0, 36), (36, 72), (20, 28), (67, 72)])
def test_the_outputs_of_a_rank_are_cut_exactly(tmp_path: Path, name: str, rows: Span) -> None:
    tensors, expected = FORMATS[name].pack(OUTPUTS, INPUTS, torch.Generator().manual_seed(1))
    write(tmp_path, tensors, FORMATS[name].config)
    result = read(tmp_path, part(rows=rows))
    assert torch.equal(result.dequantized(), expected[slice(*rows)])


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in SCATTERED])
@pytest.mark.parametrize("columns", [(0, 96), (96, 192), (64, 128), (48, 80), (176, 192)])
def test_the_inputs_of_a_rank_are_cut_exactly(tmp_path: Path, name: str, columns: Span) -> None:
    tensors, expected = FORMATS[name].pack(OUTPUTS, INPUTS, torch.Generator().manual_seed(1))
    write(tmp_path, tensors, FORMATS[name].config)
    result = read(tmp_path, part(columns=columns))
    assert result.group_size >= 16
    assert torch.equal(result.dequantized(), expected[:, slice(*columns)])


@pytest.mark.parametrize(
    "name", ["gptq", "awq", "pack-quantized", "fp8-block", "nf4", "nvfp4-pack-quantized"]
)
def test_inputs_that_end_inside_the_last_group_are_exact(tmp_path: Path, name: str) -> None:
    """160 inputs are 3.3 blocks of 48 and 2.5 of 64; a rank's 80 are no groups of 32."""
    tensors, expected = FORMATS[name].pack(OUTPUTS, 160, torch.Generator().manual_seed(1))
    write(tmp_path, tensors, FORMATS[name].config)
    for columns in ((0, 160), (80, 160)):
        cut = Cut(outputs=OUTPUTS, inputs=160, rows=(0, OUTPUTS), columns=columns)
        assert torch.equal(read(tmp_path, cut).dequantized(), expected[:, slice(*columns)])


@pytest.mark.parametrize("name", FORMATS)
def test_ranks_that_would_cut_groups_are_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, {}, FORMATS[name].config)
    quantization = read_quantization(tmp_path, None)
    assert quantization is not None
    quantization.check_ranks([(NAME, INPUTS)], 1)
    if name in SCATTERED:
        with pytest.raises(UnsupportedModel, match=r"2 shards .*up_proj.* shards work: 1$"):
            quantization.check_ranks([(NAME, INPUTS)], 2)
        return
    quantization.check_ranks([(NAME, INPUTS)], 2)
    if quantization.format_of([NAME]).group_size(INPUTS) == INPUTS:  # type: ignore[union-attr]
        return
    with pytest.raises(UnsupportedModel, match=r"24 shards .*192 inputs.*shards work: 1, 2, 3"):
        quantization.check_ranks([(NAME, INPUTS)], 24)


FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.stem for path in FIXTURES.glob("*.safetensors"))
PROJECTION = "model.layers.0.self_attn.q_proj"


def test_the_folder_has_fixtures_of_many_formats() -> None:
    assert len(NAMES) > 20


@pytest.mark.parametrize("name", NAMES)
def test_weights_match_the_library(tmp_path: Path, name: str) -> None:
    path = FIXTURES / f"{name}.safetensors"
    tensors = load_file(path)
    expected = tensors.pop("expected")
    save_file(
        {f"{PROJECTION}.{kind}": each for kind, each in tensors.items()},
        tmp_path / "model.safetensors",
    )
    with safe_open(path, framework="pt") as file:
        config = json.loads(file.metadata()["config"])
    (tmp_path / "config.json").write_text("{}")
    edit_json(tmp_path / "config.json", quantization_config=config)
    quantization = read_quantization(tmp_path, None)
    assert quantization is not None
    reader = LinearReader(SafetensorFiles(tmp_path), quantization, lambda *_: None)
    outputs, inputs = expected.shape
    cut = Cut(outputs=outputs, inputs=inputs, rows=(0, outputs), columns=(0, inputs))
    result = reader.read(f"{PROJECTION}.weight", cut)
    assert result is not None
    if name == "llm-int8":
        # The library rounds the product with the largest magnitude before it divides by 127.
        torch.testing.assert_close(result.dequantized(), expected, rtol=2**-22, atol=0)
    else:
        assert torch.equal(result.dequantized().to(expected.dtype), expected)


STACKED = "model.layers.0.mlp.experts.gate_up_proj"
EXPERTS, EXPERT_OUTPUTS, EXPERT_INPUTS = SHAPE = (3, 8, 96)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (EXPERTS, EXPERT_OUTPUTS, EXPERT_INPUTS // 32)
    return {
        f"{STACKED}_blocks": torch.randint(0, 256, (*shape, 16), generator=generator).to(
            torch.uint8
        ),
        f"{STACKED}_scales": torch.randint(110, 135, shape, generator=generator).to(torch.uint8),
    }


def open_weights(folder: Path, tensors: dict[str, torch.Tensor]) -> Weights:
    save_file(tensors, folder / "model.safetensors")
    cpu = torch.device("cpu")
    return Weights(folder, dtype=torch.float32, device=cpu, group=ProcessGroup.single())


def test_experts_match_transformers(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    expected = convert_moe_packed_tensors(*tensors.values(), dtype=torch.float32).transpose(1, 2)
    weights = open_weights(tmp_path, tensors)
    for rows, columns in ((slice(0, 8), (0, 96)), (slice(1, 6, 2), (48, 96))):
        for index in range(EXPERTS):
            result = weights.stacked_codes(STACKED, SHAPE, index, rows=rows, columns=columns)
            assert result is not None
            assert torch.equal(result.dequantized(), expected[index, rows, slice(*columns)])
    weights.release()
    weights.close()


def test_other_experts_are_not_read(tmp_path: Path) -> None:
    weights = open_weights(tmp_path, {STACKED: torch.zeros(1, 2, 32)})
    result = weights.stacked_codes(STACKED, (1, 2, 32), 0, rows=slice(0, 2), columns=(0, 32))
    assert result is None
    weights.close()


def test_damaged_experts_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    scales = tensors[f"{STACKED}_scales"]
    damaged = {
        "exponent 255": {f"{STACKED}_scales": scales.index_fill(2, torch.tensor([1]), 255)},
        "has shape": {f"{STACKED}_scales": scales[:, :, :2].contiguous()},
        "has dtype int32, not uint8": {f"{STACKED}_blocks": tensors[f"{STACKED}_blocks"].int()},
    }
    for message, change in damaged.items():
        weights = open_weights(tmp_path, tensors | change)
        with pytest.raises(
            WeightsError, match=rf"tensor {STACKED}_.* in model.safetensors.*{message}"
        ):
            weights.stacked_codes(STACKED, SHAPE, 1, rows=slice(0, 8), columns=(0, 96))
        weights.close()
