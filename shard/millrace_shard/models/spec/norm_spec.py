"""Norms, and their places in a layer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class NormPlaces(Enum):
    """Where a layer has norms."""

    BEFORE = "before"
    """Before attention and feed-forward, as in Llama."""
    AFTER = "after"
    """After attention and feed-forward, before their results are added, as in OLMo 2."""
    AROUND = "around"
    """Before and after both, as in Gemma 2."""
    PARALLEL = "parallel"
    """Once, before attention and feed-forward, which both read its result, as in Cohere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """A norm over the last axis, computed in float32."""

    eps: float
    centred: bool = False
    """Whether the mean is subtracted first (LayerNorm); otherwise RMSNorm."""
    plus_one: bool = False
    """Whether 1 is added to the weight."""
    wide: bool = False
    """Whether the weight is multiplied in float32, before the result is rounded; otherwise after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNormSpec:
    """The norms of queries and keys."""

    norm: NormSpec
    whole_width: bool = False
    """Whether one norm covers all heads; otherwise each head has its own statistics."""
    weight_per_head: bool = False
    """Whether each head has its own weights."""
    after_rope: bool = False
    """Whether heads are rotated first."""
