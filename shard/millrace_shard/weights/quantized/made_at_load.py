"""Weights that are quantised while an unquantised checkpoint is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_shard.weights.quantized.unpacking import (
    FLOAT8,
    float8_values,
    integers,
    signed_bytes,
)

GROUP = 64
PASSES = 2
"""Times that integers are rounded again after their scale was fitted; more reduce the error by less than 1 %."""
ELEMENTS_PER_PASS = 1 << 18
"""Elements that are quantised at a time: intermediate tensors stay in the cache."""
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The quantiles of a normal distribution, scaled to 1 (QLoRA, appendix E)."""
FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
"""The positive numbers of bitsandbytes' fp4 in the order of their codes, times 12; the fourth bit is the sign."""

Quantize = Callable[[Tensor], QuantizedTensor]
"""From rows [n, in] float32 of a weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeAtLoad:
    """A way to quantise."""

    method: str
    """The value of --quantize."""
    summary: str
    """The computed format, for the log."""
    linear: Quantize
    head: Quantize | None = None
    """None: the output head keeps its dtype."""


def quantized(weight: Tensor, quantize: Quantize) -> QuantizedTensor:
    """`weight` [out, in], some rows at a time."""
    step = max(1, ELEMENTS_PER_PASS // weight.shape[1])
    parts = [quantize(rows.float().contiguous()) for rows in torch.split(weight, step)]
    if len(parts) == 1:
        return parts[0]
    return QuantizedTensor(
        codes=torch.cat([part.codes for part in parts]),
        values=parts[0].values,
        scales=torch.cat([part.scales for part in parts]),
        group_size=parts[0].group_size,
    )


def to_int4(rows: Tensor) -> QuantizedTensor:
    """Integers from -8 to 7 in groups of 64: nearest ones, under the scale with the least squared error for them."""
    grouped = _grouped(rows)
    extreme = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))
    codes = _nearest(grouped, extreme / -8, -8, 7)
    for _ in range(PASSES):
        codes = _nearest(grouped, _fitted(codes, grouped), -8, 7)
    return QuantizedTensor(
        codes=_ungrouped((codes + 8).to(torch.uint8), rows),
        values=integers(4),
        scales=_fitted(codes, grouped).squeeze(-1),
        group_size=GROUP,
    )


def to_int8(rows: Tensor) -> QuantizedTensor:
    """Integers from -127 to 127 with a scale for each output."""
    scale = rows.abs().amax(-1, keepdim=True) / 127
    codes = _nearest(rows, scale, -127, 127).to(torch.int8)
    return QuantizedTensor(
        codes=codes.view(torch.uint8),
        values=signed_bytes(),
        scales=scale,
        group_size=rows.shape[1],
    )


def to_fp8(rows: Tensor) -> QuantizedTensor:
    """Numbers of e4m3fn with a scale for each output."""
    largest = torch.finfo(FLOAT8).max
    scale = rows.abs().amax(-1, keepdim=True) / largest
    codes = (rows / _without_zeros(scale)).clamp(-largest, largest).to(FLOAT8)
    return QuantizedTensor(
        codes=codes.view(torch.uint8),
        values=float8_values(),
        scales=scale,
        group_size=rows.shape[1],
        e4m3_inputs=True,
    )


def to_nf4(rows: Tensor) -> QuantizedTensor:
    """Codes of NF4 in groups of 64, scaled by the largest magnitude."""
    return _by_table(rows, torch.tensor(NF4))


def to_fp4(rows: Tensor) -> QuantizedTensor:
    """Codes of bitsandbytes' fp4 in groups of 64, scaled by the largest magnitude."""
    return _by_table(rows, fp4_values())


def fp4_values() -> Tensor:
    positive = torch.tensor(FP4) / 12
    return torch.cat((positive, -positive))


def made_at_load(flag: str | None) -> MadeAtLoad | None:
    """The way that --quantize requests; None for other values."""
    return None if flag is None else METHODS.get(flag)


def _by_table(rows: Tensor, values: Tensor) -> QuantizedTensor:
    grouped = _grouped(rows)
    scale = grouped.abs().amax(-1, keepdim=True)
    ordered, codes = values.sort(stable=True)
    limits = (ordered[1:] + ordered[:-1]) / 2
    nearest = codes[torch.bucketize(grouped / _without_zeros(scale), limits)]
    return QuantizedTensor(
        codes=_ungrouped(nearest.to(torch.uint8), rows),
        values=values,
        scales=scale.squeeze(-1),
        group_size=GROUP,
    )


def _grouped(rows: Tensor) -> Tensor:
    """[n, groups, 64], with zeros after the last input."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % GROUP))
    return padded.view(len(rows), -1, GROUP)


def _ungrouped(codes: Tensor, rows: Tensor) -> Tensor:
    return codes.flatten(1)[:, : rows.shape[1]].contiguous()


def _fitted(codes: Tensor, values: Tensor) -> Tensor:
    """The scales with the least squared error; 0 for groups of zeros."""
    squares = codes.square().sum(-1, keepdim=True)
    return (codes * values).sum(-1, keepdim=True) / _without_zeros(squares)


def _nearest(values: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
    return (values / _without_zeros(scale)).round().clamp(least, most)


def _without_zeros(scale: Tensor) -> Tensor:
    """Scales of groups without another number than 0 are replaced, since 0 / 0 is NaN."""
    return torch.where(scale == 0, 1.0, scale)


_HEAD = "the head keeps its dtype"
METHODS = {
    each.method: each
    for each in (
        MadeAtLoad(
            method="int4",
            summary="int4 in groups of 64; the head is int8",
            linear=to_int4,
            head=to_int8,
        ),
        MadeAtLoad(
            method="bitsandbytes-nf4",
            summary=f"nf4 in groups of 64; {_HEAD}",
            linear=to_nf4,
        ),
        MadeAtLoad(
            method="bitsandbytes-fp4",
            summary=f"fp4 in groups of 64; {_HEAD}",
            linear=to_fp4,
        ),
        MadeAtLoad(
            method="bitsandbytes",
            summary=f"int8 with a scale for each output; {_HEAD}",
            linear=to_int8,
        ),
        MadeAtLoad(
            method="eetq",
            summary=f"int8 with a scale for each output; {_HEAD}",
            linear=to_int8,
        ),
        MadeAtLoad(
            method="fp8",
            summary=f"e4m3 with a scale for each output; {_HEAD}",
            linear=to_fp8,
        ),
    )
}
"""By the values of --quantize."""
