"""Linears of random codes in every format, with the numbers that they stand for by the formats' definitions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from millrace_shard.weights.quantized.made_at_load import NF4, fp4_values

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output at each nibble of a word, from the low bits on."""


def into_words(codes: Tensor, bits: int) -> Tensor:
    """int32 words [rows, ceil(n * bits / 32)] of codes [rows, n], the first in the low bits."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % per_word))
    shifts = torch.arange(per_word) * bits
    words = (padded.view(len(codes), -1, per_word) << shifts).sum(-1)
    return (words - ((words >> 31) << 32)).to(torch.int32)


def into_awq_words(codes: Tensor) -> Tensor:
    """int32 words [rows, n / 8] of 4-bit codes [rows, n] in AWQ's order."""
    ordered = codes.view(len(codes), -1, 8)[..., AWQ_ORDER].flatten(1)
    return into_words(ordered, 4)


def into_bytes(codes: Tensor, *, high_first: bool = False) -> Tensor:
    """Bytes [rows, n / 2] of 4-bit codes [rows, n]."""
    first, second = codes[:, 0::2].long(), codes[:, 1::2].long()
    low, high = (second, first) if high_first else (first, second)
    return (low | (high << 4)).to(torch.uint8)


GROUP = 32
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Tensors = dict[str, Tensor]
Pack = Callable[[int, int, torch.Generator], tuple[Tensors, Tensor]]
"""From outputs, inputs and randomness to the tensors of a linear by kind, and its weight [out, in] float32."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format: `config` is its quantization_config."""

    config: Mapping[str, Any]
    pack: Pack


def _codes(outputs: int, inputs: int, bits: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 1 << bits, (outputs, inputs), generator=generator)


def _scales(
    outputs: int, groups: int, generator: torch.Generator, size: float, dtype: torch.dtype
) -> Tensor:
    found = torch.rand(outputs, groups, generator=generator) + 0.5
    return (found * size).to(dtype)


def _wide(values: Tensor, inputs: int) -> Tensor:
    """Values of groups [out, groups] for each input."""
    return values.repeat_interleave(-(-inputs // values.shape[1]), 1)[:, :inputs]


def gptq(bits: int, *, version: int = 1, symmetric: bool = False, scattered: bool = False) -> Pack:
    """GPTQ in groups of 32; `scattered` as with desc_act."""

    def pack(outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        codes, groups = _codes(outputs, inputs, bits, generator), -(-inputs // GROUP)
        scales = _scales(outputs, groups, generator, 0.4 / (1 << bits), torch.float16)
        middle = 1 << (bits - 1)
        # A zero of 0 is stored as all ones in the first version, which tools read in different ways.
        zeros = torch.randint(1, 1 << bits, (outputs, groups), generator=generator)
        zeros = torch.full_like(zeros, middle) if symmetric else zeros
        group_of = torch.arange(inputs) // GROUP
        if scattered:
            group_of = group_of[torch.randperm(inputs, generator=generator)]
        weight = (codes - zeros[:, group_of]) * scales.float()[:, group_of]
        stored = zeros - 1 if version == 1 else zeros
        return {
            "qweight": into_words(codes, bits).T.contiguous(),
            "qzeros": into_words(stored.T.contiguous(), bits),
            "scales": scales.T.contiguous(),
            "g_idx": group_of.to(torch.int32),
        }, weight

    return pack


def awq(outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensors, Tensor]:
    """AWQ's layout `gemm` in groups of 32."""
    codes, groups = _codes(outputs, inputs, 4, generator), inputs // GROUP
    scales = _scales(outputs, groups, generator, 0.025, torch.float16)
    zeros = torch.randint(0, 16, (outputs, groups), generator=generator)
    return {
        "qweight": into_awq_words(codes.T.contiguous()),
        "qzeros": into_awq_words(zeros.T.contiguous()),
        "scales": scales.T.contiguous(),
    }, _wide(scales.float(), inputs) * (codes - _wide(zeros, inputs))


def packed_integers(
    bits: int, *, group: int | None, symmetric: bool = True, scattered: bool = False
) -> Pack:
    """compressed-tensors, pack-quantized."""

    def pack(outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        codes, half = _codes(outputs, inputs, bits, generator), 1 << (bits - 1)
        groups = -(-inputs // (group or inputs))
        scales = _scales(outputs, groups, generator, 0.4 / (1 << bits), torch.bfloat16)
        zeros = torch.randint(0, 1 << bits, (outputs, groups), generator=generator)
        zeros = torch.full_like(zeros, half) if symmetric else zeros
        group_of = torch.arange(inputs) // (group or inputs)
        tensors = {
            "weight_packed": into_words(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = into_words(zeros.T.contiguous(), bits).T.contiguous()
        if scattered:
            group_of = group_of[torch.randperm(inputs, generator=generator)]
            tensors["weight_g_idx"] = group_of.to(torch.int32)
        return tensors, (codes - zeros[:, group_of]) * scales.float()[:, group_of]

    return pack


def integers(*, strategy: str = "channel", symmetric: bool = True) -> Pack:
    """compressed-tensors, int-quantized."""

    def pack(outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        codes = _codes(outputs, inputs, 8, generator) - 128
        rows = outputs if strategy == "channel" else 1
        scales = _scales(rows, 1, generator, 0.0015, torch.bfloat16)
        zeros = torch.randint(-128, 128, (rows, 1), generator=generator)
        tensors = {"weight": codes.to(torch.int8), "weight_scale": scales}
        if not symmetric:
            tensors["weight_zero_point"] = zeros.to(torch.int8)
        shifted = codes if symmetric else codes - zeros
        if strategy == "tensor":
            tensors["weight_scale"] = scales.view(1)
        return tensors, shifted * scales.float()

    return pack


def float8(name: str, block: tuple[int, int] | None, *, rows: bool = True, axes: int = 2) -> Pack:
    """e4m3 with scales in float32: blocks, one for each output, or one, which has `axes` axes."""

    def pack(outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        values = torch.randn(outputs, inputs, generator=generator).to(torch.float8_e4m3fn)
        height, width = block or (1 if rows else outputs, inputs)
        shape = -(-outputs // height), -(-inputs // width)
        scales = _scales(*shape, generator, 0.1, torch.float32)
        wide = scales.repeat_interleave(height, 0)[:outputs].repeat_interleave(width, 1)[:, :inputs]
        stored = scales if rows or block else scales.reshape((1,) * axes)
        return {"weight": values, name: stored}, values.float() * wide

    return pack


def mxfp4(outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensors, Tensor]:
    """compressed-tensors, mxfp4-pack-quantized."""
    codes = _codes(outputs, inputs, 4, generator)
    exponents = torch.randint(120, 125, (outputs, inputs // 32), generator=generator)
    return {
        "weight_packed": into_bytes(codes),
        "weight_scale": exponents.to(torch.uint8),
    }, E2M1[codes] * torch.exp2(_wide(exponents, inputs) - 127.0)


def nvfp4(packed: str, whole: str, *, divides: bool) -> Pack:
    """e2m1 in groups of 16."""

    def pack(outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        codes = _codes(outputs, inputs, 4, generator)
        scales = _scales(outputs, inputs // 16, generator, 100, torch.float8_e4m3fn)
        own = torch.rand(1, generator=generator) + 4000
        own = own if divides else 1 / own
        wide = scales.float() / own if divides else scales.float() * own
        return {
            packed: into_bytes(codes),
            "weight_scale": scales,
            whole: own,
        }, E2M1[codes] * _wide(wide, inputs)

    return pack


def four_bits(kind: str, *, nested: bool) -> Pack:
    """bitsandbytes in blocks of 64, whose scales are codes of a table themselves if `nested`."""

    def pack(outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        codes, blocks = _codes(outputs, inputs, 4, generator), -(-outputs * inputs // 64)
        table = torch.tensor(NF4) if kind == "nf4" else fp4_values()
        absmax = _scales(blocks, 1, generator, 0.1, torch.float32).flatten()
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": 64,
            "dtype": "bfloat16",
            "shape": [outputs, inputs],
        }
        tensors = {
            "weight": into_bytes(codes.view(1, -1), high_first=True).view(-1, 1),
            "weight.absmax": absmax,
            "weight.quant_map": table,
        }
        if nested:
            size, wide_table = 256, torch.rand(256, generator=generator).sort().values
            small = torch.randint(0, 256, (blocks,), generator=generator)
            outer = _scales(math.ceil(blocks / size), 1, generator, 0.1, torch.float32).flatten()
            state |= {"nested_blocksize": size, "nested_dtype": "float32", "nested_offset": 0.05}
            tensors |= {
                "weight.absmax": small.to(torch.uint8),
                "weight.nested_absmax": outer,
                "weight.nested_quant_map": wide_table,
            }
            absmax = wide_table[small] * outer[torch.arange(blocks) // size] + 0.05
        text = json.dumps(state).encode()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor([*text]).to(torch.uint8)
        of_block = absmax[torch.arange(outputs * inputs) // 64].view(outputs, inputs)
        return tensors, table[codes] * of_block

    return pack


def scaled_bytes(outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensors, Tensor]:
    """bitsandbytes' int8."""
    codes = _codes(outputs, inputs, 8, generator) - 128
    largest = _scales(outputs, 1, generator, 0.2, torch.float32)
    return {
        "weight": codes.to(torch.int8),
        "SCB": largest.flatten(),
    }, codes * (largest * (1 / 127))


def _compressed(name: str, **weights: object) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _ints(**weights: object) -> dict[str, Any]:
    return {"type": "int", "num_bits": 4, "symmetric": True, "group_size": GROUP, **weights}


def _gptq(**settings: object) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, **settings}


_NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
_CHANNEL = {"type": "float", "num_bits": 8, "strategy": "channel"}
FORMATS: dict[str, Format] = {
    "gptq": Format(_gptq(), gptq(4)),
    "gptq-symmetric": Format(_gptq(sym=True), gptq(4, symmetric=True)),
    "gptq-v2": Format(_gptq(checkpoint_format="gptq_v2"), gptq(4, version=2)),
    "gptq-8-bits": Format(_gptq(bits=8), gptq(8)),
    "gptq-desc-act": Format(_gptq(desc_act=True), gptq(4, scattered=True)),
    "auto-round-gptq": Format(
        _gptq(quant_method="auto-round", packing_format="auto_round:auto_gptq"), gptq(4)
    ),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "auto-round-awq": Format(
        _gptq(quant_method="auto-round", packing_format="auto_round:auto_awq"), awq
    ),
    "pack-quantized": Format(
        _compressed("pack-quantized", **_ints(strategy="group")),
        packed_integers(4, group=GROUP),
    ),
    "pack-quantized-asymmetric": Format(
        _compressed("pack-quantized", **_ints(strategy="group", symmetric=False)),
        packed_integers(4, group=GROUP, symmetric=False),
    ),
    "pack-quantized-channel": Format(
        _compressed("pack-quantized", **_ints(strategy="channel", group_size=None)),
        packed_integers(4, group=None),
    ),
    "pack-quantized-8-bits": Format(
        _compressed("pack-quantized", **_ints(strategy="group", num_bits=8)),
        packed_integers(8, group=GROUP),
    ),
    "pack-quantized-actorder": Format(
        _compressed("pack-quantized", **_ints(strategy="group", actorder="group")),
        packed_integers(4, group=GROUP, scattered=True),
    ),
    "int-quantized": Format(
        _compressed("int-quantized", type="int", num_bits=8, strategy="channel"), integers()
    ),
    "int-quantized-asymmetric": Format(
        _compressed("int-quantized", type="int", num_bits=8, strategy="channel", symmetric=False),
        integers(symmetric=False),
    ),
    "naive-quantized": Format(
        _compressed("naive-quantized", type="int", num_bits=8, strategy="tensor"),
        integers(strategy="tensor"),
    ),
    "float-quantized": Format(
        _compressed("float-quantized", **_CHANNEL), float8("weight_scale", None)
    ),
    "float-quantized-tensor": Format(
        _compressed("float-quantized", type="float", num_bits=8, strategy="tensor"),
        float8("weight_scale", None, rows=False, axes=1),
    ),
    "float-quantized-block": Format(
        _compressed(
            "float-quantized", type="float", num_bits=8, strategy="block", block_structure=[48, 48]
        ),
        float8("weight_scale", (48, 48)),
    ),
    "mxfp4-pack-quantized": Format(
        _compressed("mxfp4-pack-quantized", type="float", num_bits=4, group_size=32), mxfp4
    ),
    "nvfp4-pack-quantized": Format(
        _compressed("nvfp4-pack-quantized", type="float", num_bits=4, group_size=16),
        nvfp4("weight_packed", "weight_global_scale", divides=True),
    ),
    "fp8-block": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 48]},
        float8("weight_scale_inv", (48, 48)),
    ),
    "fp8-tensor": Format(
        {"quant_method": "fp8", "activation_scheme": "static"},
        float8("weight_scale", None, rows=False, axes=0),
    ),
    "fbgemm-fp8": Format(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        float8("weight_scale", None),
    ),
    "modelopt-fp8": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        float8("weight_scale", None, rows=False, axes=0),
    ),
    "modelopt-nvfp4": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        nvfp4("weight", "weight_scale_2", divides=False),
    ),
    "nf4": Format({**_NF4, "bnb_4bit_quant_type": "nf4"}, four_bits("nf4", nested=False)),
    "nf4-nested": Format({**_NF4, "bnb_4bit_quant_type": "nf4"}, four_bits("nf4", nested=True)),
    "fp4": Format({**_NF4, "bnb_4bit_quant_type": "fp4"}, four_bits("fp4", nested=False)),
    "llm-int8": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True},
        scaled_bytes,
    ),
}
"""By names of our own. Blocks of 48 end inside a rank's part, as those of 128 do in large models."""
