"""First halves of layers that keep a state in place of keys and values, composed of single operators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.kernels.base import AttentionBlock, Kernels, LayerCache, added_and_normalised
from millrace_shard.kernels.delta_rule import DeltaHeads, DeltaInputs
from millrace_shard.kernels.elementwise import elementwise
from millrace_shard.kernels.layer_weights import LinearWeights, NormWeights
from millrace_shard.kernels.mamba2 import ConvWeights, Mamba1Channels, Mamba2Heads
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.states import LayerState


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetWeights:
    """One rank's part of the first half of a layer."""

    index: int
    """Its place among the recurrent layers."""
    norm: NormWeights
    projections: tuple[LinearWeights, ...]
    """Of queries, keys, values and gates, then of b and a: by key head in two linears, or each kind in a row in four.

    The two have [q, k, v, z] and [b, a] for each key head; the four have [q | k | v], z, b and a.
    """
    out: LinearWeights
    heads: DeltaHeads


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaWeights:
    """One rank's part of the first half of a layer with Kimi Delta Attention."""

    index: int
    """Its place among the recurrent layers."""
    norm: NormWeights
    qkv: LinearWeights
    """[q | k | v] of all heads."""
    small: LinearWeights
    """The channels that decays are made of, then the gates'; all ranks have them."""
    b: LinearWeights
    decays: LinearWeights
    """[heads * key_dim, channels]."""
    gates: LinearWeights
    """[heads * value_dim, channels]."""
    out: LinearWeights
    heads: DeltaHeads


@dataclass(frozen=True, slots=True)
class ConvLayerWeights:
    """One rank's part of the first half of a layer with a convolution."""

    index: int
    """Its place among the recurrent layers."""
    norm: NormWeights
    project: LinearWeights
    conv: ConvWeights
    out: LinearWeights


class _RecurrentHalf(ABC):
    """Norm and projections, between which a subclass computes."""

    def __init__(
        self,
        kernels: Kernels,
        weights: DeltaNetWeights | KimiDeltaWeights | ConvLayerWeights,
        projections: tuple[LinearWeights, ...],
    ) -> None:
        self._kernels = kernels
        self._index, self._norm = weights.index, weights.norm
        self._projections = [kernels.linear_from(each) for each in projections]
        self._out = kernels.linear_from(weights.out)

    def __call__(
        self,
        x: Tensor | None,
        residual: Tensor,
        batch: RaggedBatch,
        cache: LayerCache,  # noqa: ARG002
    ) -> Tensor:
        """[T, hidden]; `residual` is changed in place. The state is in the pages that `batch` names."""
        assert batch.states is not None
        normed = added_and_normalised(self._kernels, x, residual, self._norm)
        projected = [linear(normed) for linear in self._projections]
        return self._out(self._mix(projected, batch, batch.states.layers[self._index]))

    def _with_earlier(
        self, batch: RaggedBatch, changing: Sequence[Tensor], others: Sequence[Tensor] = ()
    ) -> tuple[RaggedBatch, list[Tensor]]:
        """`changing` and `others` [T, n] with accepted draft tokens before the tokens of a step, if there are any.

        `changing` are what the state depends on.
        """
        assert batch.states is not None
        replay = batch.states.replay
        if replay is None:
            return batch, [each.contiguous() for each in (*changing, *others)]
        inputs = replay.inputs(self._index, changing)
        inputs += [replay.padded(each) for each in others]
        return replace(batch, query_starts=replay.query_starts), inputs

    def _own(self, batch: RaggedBatch, x: Tensor) -> Tensor:
        """The rows [T, n] of the step's tokens among `x`, which has earlier ones, too."""
        assert batch.states is not None
        replay = batch.states.replay
        return x if replay is None else x[replay.own]

    @abstractmethod
    def _mix(self, projected: list[Tensor], batch: RaggedBatch, state: LayerState) -> Tensor:
        """[T, inner] of what the projections yield, each [T, outputs]."""


class DeltaNet(_RecurrentHalf):
    """The delta rule between its projections."""

    def __init__(self, kernels: Kernels, weights: DeltaNetWeights) -> None:
        super().__init__(kernels, weights, weights.projections)
        self._heads = weights.heads

    def _mix(self, projected: list[Tensor], batch: RaggedBatch, state: LayerState) -> Tensor:
        if len(projected) == 2:
            projected = self._ordered(*projected)
        qkv, z, b, a = projected
        batch, (qkv, b, a, z) = self._with_earlier(batch, (qkv, b, a), (z,))
        inputs = DeltaInputs(qkv, z, b, a)
        return self._own(batch, self._kernels.delta_rule(inputs, self._heads, batch, state))

    def _ordered(self, qkvz: Tensor, ba: Tensor) -> list[Tensor]:
        """From the order by key heads to [q | k | v], z, b and a."""
        heads = self._heads
        values = heads.num_values // heads.num_keys
        width = values * heads.value_dim
        by_head = qkvz.view(len(qkvz), heads.num_keys, -1)
        q, k, v, z = torch.split(by_head, [heads.key_dim, heads.key_dim, width, width], dim=2)
        b, a = torch.split(ba.view(len(ba), heads.num_keys, -1), [values, values], dim=2)
        qkv = torch.cat([each.flatten(1) for each in (q, k, v)], dim=1)
        return [qkv, z.flatten(1), b.flatten(1), a.flatten(1)]


class KimiDelta(_RecurrentHalf):
    """The delta rule with decays by channel, which are made of few channels, as are the gates."""

    def __init__(self, kernels: Kernels, weights: KimiDeltaWeights) -> None:
        super().__init__(kernels, weights, (weights.qkv, weights.small, weights.b))
        self._decays, self._gates = map(kernels.linear_from, (weights.decays, weights.gates))
        self._heads = weights.heads

    def _mix(self, projected: list[Tensor], batch: RaggedBatch, state: LayerState) -> Tensor:
        qkv, small, b = projected
        of_decays, of_gates = (each.contiguous() for each in small.chunk(2, dim=1))
        a, z = self._decays(of_decays), self._gates(of_gates)
        batch, (qkv, b, a, z) = self._with_earlier(batch, (qkv, b, a), (z,))
        inputs = DeltaInputs(qkv, z, b, a)
        return self._own(batch, self._kernels.delta_rule(inputs, self._heads, batch, state))


class _ConvLayer(_RecurrentHalf):
    """One projection, and a convolution."""

    def __init__(self, kernels: Kernels, weights: ConvLayerWeights) -> None:
        super().__init__(kernels, weights, (weights.project,))
        self._conv = weights.conv


class ShortConv(_ConvLayer):
    """A convolution between two gates, as in LFM2."""

    def _mix(self, projected: list[Tensor], batch: RaggedBatch, state: LayerState) -> Tensor:
        before, after, x = projected[0].chunk(3, dim=1)
        batch, (mixed,) = self._with_earlier(batch, (before * x,))
        mixed = self._kernels.causal_conv(mixed, self._conv, batch, state)
        return after * self._own(batch, mixed)


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """The gate of each channel, and the norm of each group of heads."""

    weight: Tensor | None
    """[heads * head_dim]; None: the gate only."""
    _: KW_ONLY
    eps: float
    gate_first: bool
    """Whether the gate is multiplied before the norm."""
    wide: bool
    """Whether weight and gate are multiplied in float32, before the result is rounded."""
    mean_over_ranks: Callable[[Tensor], Tensor] | None
    """The mean of a tensor over the ranks, if all of them share one group."""

    def apply(self, x: Tensor, gate: Tensor, num_groups: int) -> Tensor:
        """[T, n] in the dtype of `gate` [T, n]; `x` is [T, n] float32."""
        wide = gate.float()
        shares = elementwise(F.silu, wide) if wide.device.type == "cpu" else F.silu(wide)
        if self.weight is None:
            return (x * shares).to(gate.dtype)
        groups = (x * shares if self.gate_first else x).view(len(x), num_groups, -1)
        mean_square = groups.square().mean(-1, keepdim=True)
        if self.mean_over_ranks is not None:
            mean_square = self.mean_over_ranks(mean_square)
        scaled = (groups * torch.rsqrt(mean_square + self.eps)).flatten(1)
        y = scaled * self.weight if self.wide else scaled.to(gate.dtype) * self.weight
        return (y if self.gate_first else y * shares).to(gate.dtype)


class Mamba2(_ConvLayer):
    """A convolution, a state space, and a gate with a norm."""

    def __init__(
        self,
        kernels: Kernels,
        weights: ConvLayerWeights,
        heads: Mamba2Heads,
        norm: GatedNorm,
        factors: Tensor | None,
    ) -> None:
        """`factors` [outputs of the projection] are multiplied by what it yields."""
        super().__init__(kernels, weights)
        self._heads, self._gated_norm, self._factors = heads, norm, factors

    def _mix(self, projected: list[Tensor], batch: RaggedBatch, state: LayerState) -> Tensor:
        _, num_heads, _, head_dim = state.state.shape
        sizes = [num_heads * head_dim, self._conv.weight.shape[1], num_heads]
        (inputs,) = projected
        if self._factors is not None:
            inputs = (inputs * self._factors).to(inputs.dtype)
        gate, mixed, dt = torch.split(inputs, sizes, dim=1)
        batch, (mixed, dt) = self._with_earlier(batch, (mixed, dt))
        mixed = self._kernels.causal_conv(mixed, self._conv, batch, state)
        scanned = self._own(batch, self._kernels.mamba2(mixed, dt, self._heads, batch, state))
        return self._gated_norm.apply(scanned, gate.contiguous(), self._heads.num_groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionWeights:
    """What makes step sizes and matrices of the channels of Mamba 1."""

    make: LinearWeights
    """[rank + 2 * state_dim, channels]."""
    steps: LinearWeights
    """[channels, rank]."""
    norm_eps: float | None
    """Of norms without weights; None: there are none."""
    sum_over_ranks: Callable[[Tensor], Tensor] | None
    """None: there is one rank."""


class Mamba1(_ConvLayer):
    """A convolution, what it selects for each token, a state for each channel, and a gate."""

    def __init__(
        self,
        kernels: Kernels,
        weights: ConvLayerWeights,
        channels: Mamba1Channels,
        selection: SelectionWeights,
    ) -> None:
        super().__init__(kernels, weights)
        self._channels, self._selection = channels, selection
        self._make = kernels.linear_from(selection.make)
        self._steps = kernels.linear_from(selection.steps)

    def _mix(self, projected: list[Tensor], batch: RaggedBatch, state: LayerState) -> Tensor:
        x, gate = projected[0].chunk(2, dim=1)
        batch, (x,) = self._with_earlier(batch, (x,))
        x = self._kernels.causal_conv(x, self._conv, batch, state)
        made, selection, state_dim = self._make(x), self._selection, len(self._channels.rates)
        if selection.sum_over_ranks is not None:
            made = selection.sum_over_ranks(made)
        parts = torch.split(made, [made.shape[1] - 2 * state_dim, state_dim, state_dim], dim=1)
        if selection.norm_eps is not None:
            parts = tuple(_unweighted(each, selection.norm_eps) for each in parts)
        steps, matrices = self._steps(parts[0].contiguous()), torch.cat(parts[1:], dim=1)
        inputs = x, steps, matrices
        scanned = self._own(batch, self._kernels.mamba1(inputs, self._channels, batch, state))
        wide = gate.float()
        shares = elementwise(F.silu, wide) if wide.device.type == "cpu" else F.silu(wide)
        return (scanned * shares).to(gate.dtype)


def _unweighted(x: Tensor, eps: float) -> Tensor:
    """`x` [T, n] by its root mean square."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class Beside:
    """Attention and a recurrent layer over one residual; their results are multiplied and added."""

    def __init__(
        self, attention: AttentionBlock, recurrent: AttentionBlock, factors: tuple[float, float]
    ) -> None:
        """`factors` are of the results of `attention` and of `recurrent`."""
        self._attention, self._recurrent = attention, recurrent
        self._of_attention, self._of_recurrent = factors

    def __call__(
        self, x: Tensor | None, residual: Tensor, batch: RaggedBatch, cache: LayerCache
    ) -> Tensor:
        """[T, hidden]; `residual` is changed in place."""
        mixed = self._recurrent(x, residual, batch, cache) * self._of_recurrent
        return mixed + self._attention(None, residual, batch, cache) * self._of_attention
