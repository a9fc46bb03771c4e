"""Norms of rows, by the kernels' operator or in plain torch."""

from __future__ import annotations

from torch import Tensor

from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.layer.norm_weights import NormWeights


def normalised(kernels: Kernels, x: Tensor, norm: NormWeights | None) -> Tensor:
    """The norm of `x` [T, hidden]; `x` itself without a norm."""
    if norm is None:
        return x
    return kernels.rms_norm(x, norm.weight, norm.eps) if norm.is_plain else norm.apply(x)


def added_and_normalised(
    kernels: Kernels, x: Tensor | None, residual: Tensor, norm: NormWeights | None
) -> Tensor:
    """`residual += x` in place, if there is an `x`, then its norm; all [T, hidden]."""
    if x is not None and norm is not None and norm.is_plain:
        return kernels.add_rms_norm(x, residual, norm.weight, norm.eps)
    if x is not None:
        residual += x
    return normalised(kernels, residual, norm)
