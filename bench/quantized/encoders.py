"""Encoders of a weight matrix in the formats of quantised checkpoints: round to nearest, nothing calibrated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

GROUP = 128
"""Inputs that share a scale in formats of 4 bits, and inputs and outputs of a block in `fp8`."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of eight, in each nibble of a word."""
LARGEST_E4M3 = 448.0

Encoder = Callable[[str, Tensor], dict[str, Tensor]]
"""Maps a module's name and its weight [out, in] to the tensors of the file."""


def int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes 0 to 15 for -8 to 7 [out, in] int32, and scales [out, groups] float16."""
    groups = weight.float().reshape(len(weight), -1, GROUP)
    scales = (groups.abs().amax(2) / 7.5).to(torch.float16)
    codes = (groups / scales.float().unsqueeze(2)).round().clamp(-8, 7) + 8
    return codes.flatten(1).to(torch.int32), scales


def words(codes: Tensor) -> Tensor:
    """Eight codes of the last axis in each int32, the first in its lowest bits."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int64)
    packed = (codes.long().reshape(len(codes), -1, 8) << shifts).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def compressed_int4(name: str, weight: Tensor) -> dict[str, Tensor]:
    """`pack-quantized` of compressed-tensors."""
    codes, scales = int4(weight)
    return {
        f"{name}.weight_packed": words(codes),
        f"{name}.weight_scale": scales,
        f"{name}.weight_shape": torch.tensor(weight.shape),
    }


def compressed_int8(name: str, weight: Tensor) -> dict[str, Tensor]:
    """`int-quantized` of compressed-tensors, with a scale for each output."""
    wide = weight.float()
    scales = (wide.abs().amax(1, keepdim=True) / 127.5).to(torch.bfloat16)
    codes = (wide / scales.float()).round().clamp(-128, 127)
    return {f"{name}.weight": codes.to(torch.int8), f"{name}.weight_scale": scales}


def gptq(name: str, weight: Tensor) -> dict[str, Tensor]:
    """GPTQ's layout, symmetric; zeros are stored less one."""
    codes, scales = int4(weight)
    outputs, inputs = weight.shape
    sevens = torch.full((inputs // GROUP, outputs), 7)
    return {
        f"{name}.qweight": words(codes).T.contiguous(),
        f"{name}.qzeros": words(sevens),
        f"{name}.scales": scales.T.contiguous(),
        f"{name}.g_idx": (torch.arange(inputs) // GROUP).to(torch.int32),
    }


def awq(name: str, weight: Tensor) -> dict[str, Tensor]:
    """AWQ's `gemm` layout."""
    codes, scales = int4(weight)
    ordered = codes.T.reshape(codes.shape[1], -1, 8)[:, :, list(AWQ_ORDER)].flatten(1)
    outputs, inputs = weight.shape
    return {
        f"{name}.qweight": words(ordered),
        f"{name}.qzeros": words(torch.full((inputs // GROUP, outputs), 8)),
        f"{name}.scales": scales.T.contiguous(),
    }


def fp8_blocks(name: str, weight: Tensor) -> dict[str, Tensor]:
    """`fp8` in blocks of 128 by 128, as DeepSeek and Qwen publish it."""
    outputs, inputs = weight.shape
    sizes = (-(-outputs // GROUP), -(-inputs // GROUP))
    padded = torch.zeros(sizes[0] * GROUP, sizes[1] * GROUP)
    padded[:outputs, :inputs] = weight.float()
    blocks = padded.reshape(sizes[0], GROUP, sizes[1], GROUP)
    scales = blocks.abs().amax((1, 3)) / LARGEST_E4M3
    codes = blocks / scales.clamp_min(1e-12)[:, None, :, None]
    whole = codes.clamp(-LARGEST_E4M3, LARGEST_E4M3).reshape(padded.shape)[:outputs, :inputs]
    return {
        f"{name}.weight": whole.to(torch.float8_e4m3fn).contiguous(),
        f"{name}.weight_scale_inv": scales,
    }


def _compressed(bits: int, method: str) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors."""
    by_group = {"strategy": "group", "group_size": GROUP}
    by_output = {"strategy": "channel", "group_size": None}
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "dynamic": False,
        "observer": "minmax",
        **(by_group if bits == 4 else by_output),
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": method,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "output_activations": None}},
        "ignore": ["lm_head"],
    }


ENCODERS: Mapping[str, tuple[Encoder, dict[str, Any]]] = {
    "compressed-int4": (compressed_int4, _compressed(4, "pack-quantized")),
    "compressed-int8": (compressed_int8, _compressed(8, "int-quantized")),
    "gptq": (
        gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False},
    ),
    "awq": (
        awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
        },
    ),
    "fp8": (
        fp8_blocks,
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [GROUP, GROUP],
        },
    ),
}
"""By name: the encoder of a linear and the `quantization_config` of the checkpoint."""
