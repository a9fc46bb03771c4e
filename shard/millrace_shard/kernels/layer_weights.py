"""One rank's part of the weights of a layer, its norms, gates and rotation, before kernels have packed them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.kernels.elementwise import elementwise
from millrace_shard.kernels.lora.adapter_table import LoraSite
from millrace_shard.kernels.ragged import ChunkedBatches
from millrace_shard.kernels.stored_weight import StoredWeight


class Activation(Enum):
    """The function of the gates of a feed-forward half."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    """GELU by its tanh approximation."""
    RELU_SQUARED = "relu_squared"
    """`relu(up) ** 2`, without gates."""
    PLAIN_GELU = "plain_gelu"
    """`gelu(up)`, without gates."""
    PLAIN_GELU_TANH = "plain_gelu_tanh"
    """The same by its tanh approximation."""

    @property
    def has_gate(self) -> bool:
        """Whether gates are projected, whose function is multiplied by what `up` yields."""
        return self in {Activation.SILU, Activation.GELU_TANH}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedSwiglu:
    """`(up + 1) * gate * sigmoid(alpha * gate)`, after gates are clamped from above and ups from both sides."""

    alpha: float
    limit: float


class Gates(Protocol):
    """The kernels' functions of gates and ups [T, 2 * inter], gates first."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up`."""

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """`gelu(gate) * up`."""


def gate_function(
    kernels: Gates, activation: Activation | ClampedSwiglu
) -> Callable[[Tensor], Tensor]:
    """The function of `gate_up` [T, 2 * inter], gates first; without gates it is [T, inter]."""
    if isinstance(activation, ClampedSwiglu):
        return partial(clamped_swiglu, activation)
    if activation is Activation.RELU_SQUARED:
        return relu_squared
    if not activation.has_gate:
        is_tanh = activation is Activation.PLAIN_GELU_TANH
        return partial(plain_gelu, approximate="tanh" if is_tanh else "none")
    return kernels.silu_mul if activation is Activation.SILU else kernels.gelu_mul


def clamped_swiglu(activation: ClampedSwiglu, gate_up: Tensor) -> Tensor:
    """The activation of `gate_up` [T, 2 * inter], gates first, in float32: [T, inter] in the dtype of `gate_up`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    scaled = gate * activation.alpha
    is_cpu = scaled.device.type == "cpu"
    share = elementwise(torch.sigmoid, scaled) if is_cpu else scaled.sigmoid()
    return ((up + 1) * (gate * share)).to(gate_up.dtype)


def relu_squared(up: Tensor) -> Tensor:
    """The square of what is above 0, of `up` [T, inter]."""
    return F.relu(up).square()


def plain_gelu(up: Tensor, *, approximate: str) -> Tensor:
    """GELU of `up` [T, inter]."""
    function = partial(F.gelu, approximate=approximate)
    return elementwise(function, up) if up.device.type == "cpu" else function(up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` of `gate_up` [T, 2 * inter], gates first, by the tanh approximation."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gate.device.type != "cpu":
        return F.gelu(gate, approximate="tanh") * up
    return elementwise(lambda x: F.gelu(x, approximate="tanh"), gate) * up


@dataclass(frozen=True, kw_only=True)
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
    bias: Tensor | None = None
    """[n]: added in float32, where the weight is multiplied in float32; None: nothing is added."""

    @property
    def is_rms(self) -> bool:
        """Whether it is RMSNorm with the same weights for all rows, which all kernels compute by an operator."""
        return not self.centred and self.bias is None and self.weight.dim() == 1

    @cached_property
    def factors(self) -> Tensor:
        """[n] or [heads, n]: the weight, with 1 added if `plus_one`; float32 if `wide`."""
        weight = self.weight.float() if self.wide else self.weight
        return weight + 1 if self.plus_one else weight

    def apply(self, x: Tensor, mean_square: Tensor | None = None) -> Tensor:
        """The norm of `x` [..., n] in plain torch; `mean_square` [..., 1] replaces the mean square of `x` itself."""
        wide = x.float()
        if self.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        if mean_square is None:
            mean_square = wide.square().mean(-1, keepdim=True)
        scaled = wide * torch.rsqrt(mean_square + self.eps)
        if not self.wide:
            return scaled.to(x.dtype) * self.factors
        scaled = scaled * self.factors
        return (scaled if self.bias is None else scaled + self.bias.float()).to(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """The norms of queries and keys."""

    query: NormWeights
    key: NormWeights
    whole_width: bool = False
    """Whether one norm covers all heads; then weights are [heads * head_dim]."""
    after_rope: bool = False
    """Whether heads are rotated first."""
    value: NormWeights | None = None
    """Of each head of the values; None: they stay as they are."""

    @property
    def is_plain(self) -> bool:
        """Whether each head of queries and keys is normalised by RMSNorm before it is rotated, as in Qwen 3."""
        is_other = self.whole_width or self.after_rope or self.value is not None
        return not is_other and self.query.is_rms


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
    chunks: ChunkedBatches | None = None
    """What cuts steps into chunks of positions, each of which sees its own keys only."""
    softcap: float | None = None
    clip: float | None = None
    """Queries, keys and values are cut to [-clip, clip] before they are prepared."""
    sinks: Tensor | None = None
    """[num_heads] float32: scores without a value that take part in the softmax of their head."""
    has_gate: bool = False
    """Whether `qkv` has a gate after the query of each head; the result of a head is multiplied by its sigmoid."""
    slopes: Tensor | None = None
    """[num_heads] float32: what a key's position is multiplied by and added to its scores (ALiBi)."""
    by_group: bool = False
    """Whether `qkv` has the queries, the key and the value of each key-value head one after the other."""
    reads_other: bool = False
    """Whether `qkv` has queries only, which meet the keys and values of another layer."""

    @property
    def has_plain_heads(self) -> bool:
        """Whether `Kernels.rope_store` prepares the heads."""
        is_usual = self.rotation is not None and not self.rotation.interleaved
        norms_are = self.head_norms is None or self.head_norms.is_plain
        is_other = self.reads_other or self.by_group or self.slopes is not None
        return is_usual and norms_are and self.query_factors is None and not is_other


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWeights:
    """The first half of a layer whose heads make keys and values of one latent (MLA).

    Keys and values are never made: queries are multiplied by `keys` and meet the latents themselves, whose weighted
    sums are multiplied by `values`. Prompts and single tokens are computed alike.
    """

    norm: NormWeights | None
    """[hidden]; None: the half reads the residual as it is."""
    first: LinearWeights
    """[queries + latent_dim + rope_dim, hidden]: queries or their latent, then the latent and the key of all heads."""
    queries_norm: NormWeights | None
    """[query_dim]; None: `first` makes the queries."""
    queries: LinearWeights | None
    """[num_heads * (key_dim + rope_dim), query_dim]; None: `first` makes the queries."""
    latent_norm: NormWeights
    """[latent_dim]."""
    keys: Tensor
    """[num_heads, latent_dim, key_dim]."""
    values: Tensor
    """[num_heads, value_dim, latent_dim]."""
    out: LinearWeights
    """[hidden, num_heads * value_dim]."""
    rope_dim: int
    scale: float
    """Scores are queries · keys · scale."""
    rotation: Rotation | None
    """None: no position enters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    """The second half of a layer."""

    norm: NormWeights | None
    """[hidden]; None: the half reads the residual as it is."""
    gate_up: LinearWeights
    """[2 * inter, hidden], gates first; [inter, hidden] without gates."""
    down: LinearWeights
    """[hidden, inter]."""
    activation: Activation = Activation.SILU
    multipliers: tuple[float, float] = (1.0, 1.0)
    """Of gates before their function, and of the result."""
