"""One rank's part of the weights of a layer, before kernels have packed or copied them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from millrace_shard.kernels.layer.activation import Activation
from millrace_shard.kernels.layer.norm_weights import HeadNorms, NormWeights
from millrace_shard.kernels.layer.rotation import Rotation
from millrace_shard.kernels.lora.lora_site import LoraSite
from millrace_shard.kernels.stored_weight import StoredWeight


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """A weight [out, in], its bias [out], and the modules that adapters may change."""

    weight: StoredWeight
    bias: Tensor | None = None
    lora: LoraSite | None = None
    """None: there are no adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """The first half of a layer."""

    norm: NormWeights | None
    """[hidden]; None: the half reads the residual as it is."""
    qkv: LinearWeights
    """[(num_heads + 2 * num_kv_heads) * head_dim, hidden]: queries, keys, values."""
    out: LinearWeights
    """[hidden, num_heads * head_dim]."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Scores are queries · keys · scale."""
    rotation: Rotation | None
    head_norms: HeadNorms | None = None
    query_factors: Tensor | None = None
    """[positions] float32: what queries at a position are multiplied by, after their rotation."""
    mean_over_ranks: Callable[[Tensor], Tensor] | None = None
    """The mean of a tensor over the ranks, for norms over the whole width; None with one rank."""
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    """[num_heads] float32: scores that take part in the softmax of their head and have no value."""

    @property
    def has_plain_heads(self) -> bool:
        """Whether `Kernels.rope_store` prepares the heads."""
        is_usual = self.rotation is not None and not self.rotation.interleaved
        norms_are = self.head_norms is None or self.head_norms.is_plain
        return is_usual and norms_are and self.query_factors is None


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    """The second half of a layer."""

    norm: NormWeights | None
    """[hidden]; None: the half reads the residual as it is."""
    gate_up: LinearWeights
    """[2 * inter, hidden], gates first."""
    down: LinearWeights
    """[hidden, inter]."""
    activation: Activation = Activation.SILU
