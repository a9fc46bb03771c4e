"""One rank's part of the weights of a layer, its norms, gates and rotation, before kernels have packed them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.kernels.elementwise import elementwise
from millrace_shard.kernels.lora.adapter_table import LoraSite
from millrace_shard.kernels.stored_weight import StoredWeight


class Activation(Enum):
    """The function of the gates of a feed-forward half."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    """GELU by its tanh approximation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedSwiglu:
    """`(up + 1) * gate * sigmoid(alpha * gate)`, after gates are clamped from above and ups from both sides."""

    alpha: float
    limit: float


def gate_function(
    silu_mul: Callable[[Tensor], Tensor], activation: Activation | ClampedSwiglu
) -> Callable[[Tensor], Tensor]:
    """The function of `gate_up` [T, 2 * inter], gates first; `silu_mul` comes from the kernels."""
    if isinstance(activation, ClampedSwiglu):
        return partial(clamped_swiglu, activation)
    return silu_mul if activation is Activation.SILU else gelu_mul


def clamped_swiglu(activation: ClampedSwiglu, gate_up: Tensor) -> Tensor:
    """The activation of `gate_up` [T, 2 * inter], gates first, in float32: [T, inter] in the dtype of `gate_up`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    scaled = gate * activation.alpha
    is_cpu = scaled.device.type == "cpu"
    share = elementwise(torch.sigmoid, scaled) if is_cpu else scaled.sigmoid()
    return ((up + 1) * (gate * share)).to(gate_up.dtype)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` of `gate_up` [T, 2 * inter], gates first, by the tanh approximation."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gate.device.type != "cpu":
        return F.gelu(gate, approximate="tanh") * up
    return elementwise(lambda x: F.gelu(x, approximate="tanh"), gate) * up


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
        """The norm of `x` [..., n] in plain torch; `mean_square` [..., 1] replaces the mean square of `x` itself."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """The rotation of heads."""

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


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """A weight [out, in], its bias [out], and the modules that adapters may change."""

    weight: StoredWeight
    bias: Tensor | None = None
    lora: LoraSite | None = None
    """None: adapters are off."""


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
    """[num_heads] float32: scores without a value that take part in the softmax of their head."""

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
