"""A linear over quantised weights in plain torch: the oracle of compiled kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.kernels.quantized.quantized_tensor import QuantizedTensor

LARGEST = 127.0
SMALLEST = 1e-30
"""Numbers without a larger one are quantised to zeros: their scale would have no reciprocal in float32."""
ROUNDED_INPUTS = 32
"""Inputs of a row of activations that are quantised with one scale, as in the blocks of GGUF's Q8_0."""


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`rows` [..., n] as int8, and the scale of each row, float32 [..., 1], NaN for rows that are not finite."""
    wide = rows.float()
    largest = wide.abs().amax(-1, keepdim=True)
    # A Python number divided by a tensor is computed as a product with the reciprocal, which rounds twice.
    inverse = torch.where(largest > SMALLEST, torch.full_like(largest, LARGEST) / largest, 0.0)
    quantized = (wide * inverse).round().clamp(-128, 127).nan_to_num(0.0).to(torch.int8)
    worth = largest / LARGEST
    return quantized, torch.where(worth.isfinite(), worth, torch.nan)


def rounded_rows(rows: Tensor) -> Tensor:
    """`rows` [R, n], quantised to int8 with a scale for every ROUNDED_INPUTS of n, as exact numbers in float64."""
    count, size = rows.shape
    padded = F.pad(rows, (0, -size % ROUNDED_INPUTS))
    parts = padded.view(count, padded.shape[1] // ROUNDED_INPUTS, ROUNDED_INPUTS)
    quantized, worth = quantize_rows(parts)
    return (quantized.double() * worth.double()).view(padded.shape)[:, :size]


class PlainQuantizedLinear:
    """A linear whose sums are taken group by group, in float64 over the exact codes."""

    def __init__(self, weight: QuantizedTensor, bias: Tensor | None, *, integer: bool) -> None:
        """With `integer`, rows are quantised to int8 first, in the order of the codes."""
        self._weight = weight
        self._bias = bias
        self._integer = integer

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out] float64."""
        weight = self._weight
        rows = x.reshape(-1, x.shape[-1])
        if weight.input_order is not None:
            rows = rows[:, weight.input_order]
        rows = rounded_rows(rows) if self._integer else rows.double()
        y = rows.new_zeros(len(rows), weight.shape[0])
        for group, start in enumerate(range(0, weight.shape[1], weight.group_size)):
            columns = slice(start, start + weight.group_size)
            values = weight.values[weight.codes[:, columns].int()].double()
            y += (rows[:, columns] @ values.T) * weight.scales[:, group].double()
            if weight.offsets is not None:
                offsets = weight.offsets[:, group].double()
                y += rows[:, columns].sum(1, keepdim=True) * offsets
        if self._bias is not None:
            y += self._bias.double()
        return y.view(*x.shape[:-1], -1)
