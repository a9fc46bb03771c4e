"""A norm with its weight, and norms that no compiled operator computes, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class NormWeights:
    """A norm over the last axis, computed in float32."""

    weight: Tensor
    """[n], or [heads, n] where each head has its own."""
    eps: float
    centred: bool = False
    """Whether the mean is subtracted first (LayerNorm); otherwise RMSNorm."""
    plus_one: bool = False
    """Whether 1 is added to the weight."""
    wide: bool = False
    """Whether the weight is multiplied in float32, before the result is rounded; otherwise after."""

    @property
    def is_plain(self) -> bool:
        """Whether it is RMSNorm as in Llama, which all kernels compute by an operator."""
        return not (self.centred or self.plus_one or self.wide) and self.weight.dim() == 1

    def apply(self, x: Tensor, mean_square: Tensor | None = None) -> Tensor:
        """The norm of `x` [..., n] in plain torch; `mean_square` [..., 1] replaces that of `x` itself."""
        wide = x.float()
        if self.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        if mean_square is None:
            mean_square = wide.square().mean(-1, keepdim=True)
        scaled = wide * torch.rsqrt(mean_square + self.eps)
        if not self.wide:
            weight = self.weight + 1 if self.plus_one else self.weight
            return scaled.to(x.dtype) * weight
        weight = self.weight.float()
        return (scaled * (weight + 1 if self.plus_one else weight)).to(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """The norms of queries and keys."""

    query: NormWeights
    key: NormWeights
    whole_width: bool = False
    """Whether one norm covers all heads; then weights are [heads * head_dim]."""
    after_rope: bool = False
    """Whether heads are rotated first."""

    @property
    def is_plain(self) -> bool:
        """Whether each head is normalised before it is rotated, as in Qwen 3."""
        return not (self.whole_width or self.after_rope) and self.query.is_plain
