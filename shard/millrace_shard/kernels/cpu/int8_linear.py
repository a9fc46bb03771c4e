"""Linears with int8 weights and int8 activations (dynamic W8A8): half the memory of bfloat16 weights.

Weights are symmetric with one scale per output; activations are symmetric with one scale per row, computed at run time.
Sums are integers and exact, so a row's bits depend on the row alone. The output head keeps its dtype, since its errors
would affect the probabilities directly.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, cast

import torch
from torch import Tensor

from millrace_shard.kernels.base import Kernels, Linear
from millrace_shard.kernels.build import operators_loaded
from millrace_shard.kernels.layer.blocks import ComposedBlocks
from millrace_shard.kernels.lora.lora_site import LoraSite

LARGEST = 127.0
SMALLEST = 1e-30
"""A row without a larger value is quantised to zeros: its scale would have no reciprocal in float32."""

logger = logging.getLogger(__name__)


def with_int8(kernels: Kernels) -> Kernels:
    """`kernels` with every linear in int8 but the head."""
    return cast("Kernels", Int8Kernels(kernels))


class Int8Kernels(ComposedBlocks):
    """Kernels whose linears are int8; everything else is delegated to the wrapped kernels."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._kernels, name)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Quantize `weight` [out, in] and keep `bias` [out]."""
        kind = TiledInt8Linear if is_fast() else PlainInt8Linear
        return kind(weight, bias)

    def router(self, weight: Tensor) -> Linear:
        """The router of the wrapped kernels, over `weight` [E, hidden] float32."""
        return self._kernels.router(weight)

    def head(self, weight: Tensor, lora: LoraSite | None = None) -> Linear:
        """The head of the wrapped kernels, over `weight` [vocab, hidden]."""
        return self._kernels.head(weight, lora)


def is_fast() -> bool:
    """Whether the int8 operator is available and correct; if not, int8 is slower than bfloat16."""
    return operators_loaded() and _agrees_with_plain()


@functools.cache
def _agrees_with_plain() -> bool:
    """Compare operator and plain torch, over one row, and over enough long rows for sums that are taken in parts."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 1700, generator=generator).bfloat16() for n in (70, 40))
    fast, plain = (kind(weight, None) for kind in (TiledInt8Linear, PlainInt8Linear))
    agrees = all(torch.equal(fast(rows), plain(rows)) for rows in (x, x[:1]))
    if not agrees:
        logger.warning("int8 linears in plain torch: the operator differs from it on this CPU")
    return agrees


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`rows` [R, n] as int8 [R, n], and the scale of each row, float32 [R, 1], NaN for rows that are not finite."""
    wide = rows.float()
    largest = wide.abs().amax(-1, keepdim=True)
    # A Python number divided by a tensor is computed as a product with the reciprocal, which rounds twice.
    inverse = torch.where(largest > SMALLEST, torch.full_like(largest, LARGEST) / largest, 0.0)
    quantized = (wide * inverse).round().clamp(-128, 127).nan_to_num(0.0).to(torch.int8)
    worth = largest / LARGEST
    return quantized, torch.where(worth.isfinite(), worth, torch.nan)


class TiledInt8Linear:
    """An int8 linear over bfloat16 rows, by the compiled operator."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        quantized, scales = quantize(weight)
        self._packed = torch.ops.millrace.pack_int8(quantized.contiguous())
        self._scales = scales.flatten()
        self._bias = torch.empty(0) if bias is None else bias.float().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        y = x.new_empty(*x.shape[:-1], len(self._scales))
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        torch.ops.millrace.int8_linear(
            y.view(-1, len(self._scales)), rows, self._packed, self._scales, self._bias
        )
        return y


class PlainInt8Linear:
    """The int8 linear in plain torch: products of int8 are exact in float64, but slow."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, scales = quantize(weight)
        self._scales = scales.flatten()
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        rows, worth = quantize(x.reshape(-1, x.shape[-1]))
        sums = (rows.double() @ self._weight.double().T).float()
        y = sums * (worth * self._scales)
        if self._bias is not None:
            y = y + self._bias
        return y.to(x.dtype).view(*x.shape[:-1], len(self._scales))
