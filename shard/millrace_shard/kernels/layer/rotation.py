"""Rotary position embeddings as a table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """How heads are rotated."""

    table: Tensor
    """[positions, rotary_dim] float32, as `Kernels.rope_store` takes it."""
    interleaved: bool = False
    """Whether channel 2 i is paired with 2 i + 1; otherwise channel i is paired with i + rotary_dim / 2."""

    def apply(self, heads: Tensor, positions: Tensor) -> None:
        """Rotate `heads` [T, H, head_dim] of tokens at `positions` [T] in place, in float32."""
        rotated = heads[..., : self.table.shape[1]]
        cos, sin = self.table[positions].unsqueeze(1).chunk(2, dim=-1)
        wide = rotated.float()
        if self.interleaved:
            left, right = wide[..., 0::2], wide[..., 1::2]
        else:
            left, right = wide.chunk(2, dim=-1)
        turned = left * cos - right * sin, right * cos + left * sin
        if self.interleaved:
            rotated.copy_(torch.stack(turned, dim=-1).flatten(-2))
        else:
            rotated.copy_(torch.cat(turned, dim=-1))
