"""Linears over weights packed for the CPU: blocked for our operator, or reordered by oneDNN.

With the blocked form, and with oneDNN in float32, a row's bits do not depend on other rows. With oneDNN in bfloat16
they do; it is up to a fifth faster from about 100 rows on, and slower below.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.kernels.base import Linear
from millrace_shard.kernels.plain import FixedShapeLinear

ROWS_HINT = 64
"""The number of rows for which oneDNN chooses the layout; its influence on speed is small."""


def pack(weight: Tensor, bias: Tensor | None, *, deterministic: bool) -> Linear:
    """The linear for the dtype and shape of `weight`; in plain torch where neither packed form fits."""
    exact = weight.dtype == torch.float32
    if (exact or not deterministic) and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return ReorderedLinear(weight, bias)
    if weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0:
        return BlockedLinear(weight, bias)
    return FixedShapeLinear(weight, bias)


class BlockedLinear:
    """A bfloat16 linear by our operator, which sums over `in` (even) in one order."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._out = weight.shape[0]
        self._packed = torch.ops.millrace.pack_linear(weight.contiguous())
        self._bias = weight.new_empty(0) if bias is None else bias.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        y = x.new_empty(*x.shape[:-1], self._out)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        torch.ops.millrace.packed_linear(y.view(-1, self._out), rows, self._packed, self._bias)
        return y


class ReorderedLinear:
    """A linear by oneDNN. In float32 a single row gets other bits, so it is padded to two."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._out = weight.shape[0]
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)  # noqa: SLF001
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        rows = x.reshape(-1, x.shape[-1])
        num_rows = rows.shape[0]
        if num_rows == 0:
            return x.new_empty(*x.shape[:-1], self._out)
        if num_rows == 1 and x.dtype == torch.float32:
            rows = F.pad(rows, (0, 0, 0, 1))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001
            rows, self._packed, self._bias, "none", [], ""
        )
        return y[:num_rows].view(*x.shape[:-1], self._out)
