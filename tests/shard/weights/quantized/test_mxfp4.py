from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import WeightsError
from millrace_shard.weights.weights import Weights

NAME = "model.layers.0.mlp.experts.gate_up_proj"
EXPERTS, OUTPUTS, INPUTS = SHAPE = (3, 8, 96)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (EXPERTS, OUTPUTS, INPUTS // 32)
    return {
        f"{NAME}_blocks": torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8),
        f"{NAME}_scales": torch.randint(110, 135, shape, generator=generator).to(torch.uint8),
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
            found = weights.stacked_codes(NAME, SHAPE, index, rows=rows, columns=columns)
            assert found is not None
            assert torch.equal(found.dequantized(), expected[index, rows, slice(*columns)])
    weights.release()
    weights.close()


def test_other_experts_are_not_read(tmp_path: Path) -> None:
    weights = open_weights(tmp_path, {NAME: torch.zeros(1, 2, 32)})
    found = weights.stacked_codes(NAME, (1, 2, 32), 0, rows=slice(0, 2), columns=(0, 32))
    assert found is None
    weights.close()


def test_damaged_experts_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    scales = tensors[f"{NAME}_scales"]
    damaged = {
        "exponent 255": {f"{NAME}_scales": scales.index_fill(2, torch.tensor([1]), 255)},
        "has shape": {f"{NAME}_scales": scales[:, :, :2].contiguous()},
        "has dtype int32, not uint8": {f"{NAME}_blocks": tensors[f"{NAME}_blocks"].int()},
    }
    for message, change in damaged.items():
        weights = open_weights(tmp_path, tensors | change)
        with pytest.raises(
            WeightsError, match=rf"tensor {NAME}_.* in model.safetensors.*{message}"
        ):
            weights.stacked_codes(NAME, SHAPE, 1, rows=slice(0, 8), columns=(0, 96))
        weights.close()
