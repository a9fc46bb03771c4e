"""Halves of a layer by their definitions, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.kernels.layer_weights import (
    AttentionWeights,
    LinearWeights,
    NormWeights,
    Rotation,
)

EPS = 1e-5


def norm_of(size: int) -> NormWeights:
    """A random norm, in bfloat16."""
    return NormWeights(weight=1 + torch.randn(size).to(torch.bfloat16) / 8, eps=EPS)


def rotation_of(dim: int) -> Rotation:
    """Of 512 positions."""
    angles = torch.arange(512).unsqueeze(1) / 100 ** (torch.arange(dim // 2) / dim)
    return Rotation(table=torch.cat((angles.cos(), angles.sin()), dim=1))


def norm(x: Tensor, weights: NormWeights | None) -> Tensor:
    """The norm of `x`, float64."""
    assert weights is not None
    weight = weights.weight.double() + weights.plus_one
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def apply(weights: LinearWeights, x: Tensor) -> Tensor:
    """A linear of `x`, float64, without adapters."""
    bias = None if weights.bias is None else weights.bias.double()
    return F.linear(x, weights.weight.copied().double(), bias)


def attention_of_one(
    weights: AttentionWeights,
    residual: Tensor,
    apply: Callable[[LinearWeights, Tensor], Tensor] = apply,
) -> Tensor:
    """The block over one whole sequence, whose linears are `apply`."""
    heads, kv_heads, dim = weights.num_heads, weights.num_kv_heads, weights.head_dim
    qkv = apply(weights.qkv, norm(residual, weights.norm)).view(len(residual), -1, dim)
    q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
    if weights.head_norms is not None:
        q, k = norm(q, weights.head_norms.query), norm(k, weights.head_norms.key)
    assert weights.rotation is not None
    q, k = (_rotated(each, weights.rotation.table) for each in (q, k))
    k, v = (each.repeat_interleave(heads // kv_heads, dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
    at = torch.arange(len(residual))
    seen = at[None] <= at[:, None]
    if weights.window is not None:
        seen &= at[None] > at[:, None] - weights.window
    scores = scores.masked_fill(~seen, -math.inf)
    if weights.sinks is not None:
        sinks = weights.sinks.double().view(-1, 1, 1).expand(-1, len(residual), 1)
        scores = torch.cat((scores, sinks), dim=-1)
    probabilities = scores.softmax(-1)[..., : len(residual)]
    attended = torch.einsum("hqk,khd->qhd", probabilities, v).flatten(1)
    return apply(weights.out, attended)


def _rotated(x: Tensor, rope: Tensor) -> Tensor:
    cos, sin = rope[: len(x)].double().unsqueeze(1).chunk(2, dim=-1)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
