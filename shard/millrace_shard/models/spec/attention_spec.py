"""The attention of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from millrace_shard.models.spec.norm_spec import HeadNormSpec
from millrace_shard.models.spec.rope_spec import RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScaling:
    """Queries at position p are multiplied by 1 + beta · log(1 + floor(p / positions)), as in Llama 4."""

    beta: float
    positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention, before it is split over ranks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Scores are queries · keys · scale."""
    rope: RopeSpec | None
    """None: no position enters."""
    window: int | None = None
    """A query at position p sees the keys in (p - window, p]; None: all keys up to p."""
    softcap: float | None = None
    """Scores become softcap · tanh(score / softcap)."""
    sinks: bool = False
    """Whether each head has a learned logit that takes part in the softmax and is dropped after it."""
    head_norm: HeadNormSpec | None = None
    query_scaling: QueryScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
