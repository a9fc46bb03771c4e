"""A linear over quantised weights in plain torch: the oracle of compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_shard.kernels.quantized.quantized_tensor import QuantizedTensor

LARGEST = 127.0
SMALLEST = 1e-30
"""A row without a larger value is quantised to zeros: its scale would have no reciprocal in float32."""


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`rows` [R, n] as int8 [R, n], and the scale of each row, float32 [R, 1], NaN for rows that are not finite."""
    wide = rows.float()
    largest = wide.abs().amax(-1, keepdim=True)
    # A Python number divided by a tensor is computed as a product with the reciprocal, which rounds twice.
    inverse = torch.where(largest > SMALLEST, torch.full_like(largest, LARGEST) / largest, 0.0)
    quantized = (wide * inverse).round().clamp(-128, 127).nan_to_num(0.0).to(torch.int8)
    worth = largest / LARGEST
    return quantized, torch.where(worth.isfinite(), worth, torch.nan)


class PlainQuantizedLinear:
    """A linear whose sums are taken group by group, in float64 over the exact codes."""

    def __init__(self, weight: QuantizedTensor, bias: Tensor | None, *, integer: bool) -> None:
        """With `integer`, rows are quantised to int8 first."""
        self._weight = weight
        self._bias = bias
        self._integer = integer

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out] float64."""
        weight, worth = self._weight, None
        rows = x.reshape(-1, x.shape[-1])
        if self._integer:
            rows, worth = quantize_rows(rows)
        rows = rows.double()
        if weight.input_order is not None:
            rows = rows[:, weight.input_order]
        y = rows.new_zeros(len(rows), weight.shape[0])
        for group, start in enumerate(range(0, weight.shape[1], weight.group_size)):
            columns = slice(start, start + weight.group_size)
            values = weight.values[weight.codes[:, columns].int()].double()
            y += (rows[:, columns] @ values.T) * weight.scales[:, group].double()
            if weight.offsets is not None:
                offsets = weight.offsets[:, group].double()
                y += rows[:, columns].sum(1, keepdim=True) * offsets
        if worth is not None:
            y *= worth.double()
        if self._bias is not None:
            y += self._bias.double()
        return y.view(*x.shape[:-1], -1)
