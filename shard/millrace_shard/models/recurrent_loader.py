"""Reads a rank's weights of recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.base import AttentionBlock, Kernels
from millrace_shard.kernels.delta_rule import DeltaHeads
from millrace_shard.kernels.layer_weights import LinearWeights, NormWeights
from millrace_shard.kernels.mamba2 import ConvWeights, Mamba1Channels, Mamba2Heads
from millrace_shard.kernels.recurrent_blocks import (
    ConvLayerWeights,
    DeltaNet,
    DeltaNetWeights,
    GatedNorm,
    KimiDelta,
    KimiDeltaWeights,
    Mamba1,
    Mamba2,
    SelectionWeights,
    ShortConv,
)
from millrace_shard.models.linear_loader import LinearLoader, Part
from millrace_shard.models.recurrent_spec import (
    DeltaNetSpec,
    KimiDeltaSpec,
    Mamba1Spec,
    Mamba2Spec,
    RecurrentSpec,
    ShortConvSpec,
)
from millrace_shard.models.spec import DecoderSpec
from millrace_shard.weights.weights import Columns, Weights


class RecurrentLoader:
    """Makes the first halves of layers without attention."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        kernels: Kernels,
        linears: LinearLoader,
        group: ProcessGroup,
    ) -> None:
        self._hidden = spec.hidden_size
        recurrent = [index for index, each in enumerate(spec.layers) if each.recurrent is not None]
        self._places = {layer: place for place, layer in enumerate(recurrent)}
        self._weights = weights
        self._kernels = kernels
        self._linears = linears
        self._group = group

    def block(
        self, index: int, prefix: str, spec: RecurrentSpec, norm: NormWeights | None
    ) -> AttentionBlock:
        """The half of layer `index`, whose tensors begin with `prefix`."""
        assert norm is not None
        module, place = f"{prefix}{spec.module}.", self._places[index]
        if isinstance(spec, DeltaNetSpec):
            return DeltaNet(
                self._kernels,
                DeltaNetWeights(
                    index=place,
                    norm=norm,
                    projections=self._projections(module, spec),
                    out=self._out(module, spec, bias=False),
                    heads=self._heads(module, spec),
                ),
            )
        if isinstance(spec, KimiDeltaSpec):
            return self._kimi(place, module, spec, norm)
        if isinstance(spec, ShortConvSpec):
            part = Part("", spec.channels)
            conv = self._conv(f"{module}conv", [part], spec.kernel, bias=spec.bias, silu=False)
            project = self._columns(module, (part, part, part), "in_proj", bias=spec.bias)
            out = self._out(module, spec, bias=spec.bias)
            return ShortConv(self._kernels, ConvLayerWeights(place, norm, project, conv, out))
        if isinstance(spec, Mamba1Spec):
            return self._mamba1(place, module, spec, norm)
        return self._mamba(place, module, spec, norm)

    def _kimi(
        self, place: int, module: str, spec: KimiDeltaSpec, norm: NormWeights
    ) -> AttentionBlock:
        dim, heads = spec.head_dim, spec.num_heads

        def columns(inputs: int, *parts: Part) -> LinearWeights:
            return self._linears.columns(module, parts, inputs, fused=None, bias=False)

        return KimiDelta(
            self._kernels,
            KimiDeltaWeights(
                index=place,
                norm=norm,
                qkv=columns(self._hidden, *(Part(f"{kind}_proj", heads, dim) for kind in "qkv")),
                small=columns(self._hidden, Part("f_a_proj", 1, dim), Part("g_a_proj", 1, dim)),
                b=columns(self._hidden, Part("b_proj", heads)),
                decays=columns(dim, Part("f_b_proj", heads, dim)),
                gates=columns(dim, Part("g_b_proj", heads, dim)),
                out=self._out(module, spec, bias=False),
                heads=self._kimi_heads(module, spec),
            ),
        )

    def _kimi_heads(self, module: str, spec: KimiDeltaSpec) -> DeltaHeads:
        dim, part = spec.head_dim, Part("", spec.num_heads, spec.head_dim)
        convs = [
            self._conv(f"{module}{kind}_conv1d", (part,), spec.kernel, bias=False, silu=True)
            for kind in "qkv"
        ]
        shape = 1, 1, spec.num_heads, 1
        rates = self._weights.replicated(f"{module}A_log", *shape, dtype=torch.float32)
        biases = self._weights.replicated(f"{module}dt_bias", spec.inner, dtype=torch.float32)
        own, channels = (
            Columns("", spec.num_heads, size).span(self._group.rank, self._group.world_size)
            for size in (1, dim)
        )
        count = spec.num_heads // self._group.world_size
        return DeltaHeads(
            num_keys=count,
            num_values=count,
            key_dim=dim,
            value_dim=dim,
            conv=torch.cat([each.weight for each in convs], dim=1),
            rates=rates.flatten()[slice(*own)].exp(),
            dt_bias=biases[slice(*channels)].clone(),
            norm=self._weights.replicated(f"{module}o_norm.weight", dim),
            eps=spec.eps,
            by_channel=True,
        )

    def _mamba(
        self, place: int, module: str, spec: Mamba2Spec, norm: NormWeights
    ) -> AttentionBlock:
        heads = Part("", spec.num_heads, spec.head_dim)
        group = Part("", spec.num_groups, spec.state_dim)
        steps = Part("", spec.num_heads)
        parts, mixed = (heads, heads, group, group, steps), (heads, group, group)
        rates, dt_bias, skip = (
            self._own(module + name, spec.num_heads) for name in ("A_log", "dt_bias", "D")
        )
        weights = ConvLayerWeights(
            place,
            norm,
            self._columns(module, parts, "in_proj", bias=spec.bias),
            self._conv(f"{module}conv1d", mixed, spec.kernel, bias=spec.conv_bias, silu=True),
            self._out(module, spec, bias=spec.out_bias),
        )
        return Mamba2(
            self._kernels,
            weights,
            Mamba2Heads(
                num_groups=max(1, spec.num_groups // self._group.world_size),
                rates=rates.exp(),
                dt_bias=dt_bias,
                skip=skip,
                limits=spec.limits,
            ),
            self._gated_norm(module, spec),
            self._factors(parts, spec, rates.device),
        )

    def _mamba1(
        self, place: int, module: str, spec: Mamba1Spec, norm: NormWeights
    ) -> AttentionBlock:
        own, linears, group = Part("", spec.channels), self._linears, self._group
        conv = self._conv(f"{module}conv1d", (own,), spec.kernel, bias=spec.conv_bias, silu=True)
        project = self._columns(module, (own, own), "in_proj", bias=spec.bias)
        out = self._out(module, spec, bias=spec.bias)
        steps = Part("dt_proj", spec.channels)
        rates = self._weights.replicated(
            f"{module}A_log", spec.channels, spec.state_dim, dtype=torch.float32
        )
        first, end = Columns("", spec.channels).span(group.rank, group.world_size)
        return Mamba1(
            self._kernels,
            ConvLayerWeights(place, norm, project, conv, out),
            Mamba1Channels(
                rates=rates[first:end].t().exp().contiguous(),
                dt_bias=self._own(f"{module}dt_proj.bias", spec.channels),
                skip=self._own(f"{module}D", spec.channels),
            ),
            SelectionWeights(
                make=linears.rows(f"{module}x_proj", spec.channels, spec.made, bias=False),
                steps=linears.columns(module, (steps,), spec.rank, fused=None, bias=False),
                norm_eps=spec.norm_eps,
                sum_over_ranks=group.all_reduce if group.world_size > 1 else None,
            ),
        )

    def _gated_norm(self, module: str, spec: Mamba2Spec) -> GatedNorm:
        norm, is_one = spec.norm, spec.num_groups == 1 and self._group.world_size > 1
        if norm is None:
            return GatedNorm(None, eps=0.0, gate_first=True, wide=True, mean_over_ranks=None)
        weight = self._linears.own_heads(f"{module}norm.weight", spec.num_heads, spec.head_dim)
        return GatedNorm(
            weight.float() if norm.wide else weight,
            eps=norm.eps,
            gate_first=norm.gate_first,
            wide=norm.wide,
            mean_over_ranks=self._mean_over_ranks if is_one else None,
        )

    def _factors(
        self, parts: Sequence[Part], spec: Mamba2Spec, device: torch.device
    ) -> Tensor | None:
        """The multipliers of the rank's outputs of the projection, [outputs] float32; None if all are 1."""
        if set(spec.multipliers) == {1.0}:
            return None
        ranks = self._group.world_size
        counts = [max(1, part.units // ranks) * part.unit_size for part in parts]
        values = torch.tensor(spec.multipliers).repeat_interleave(torch.tensor(counts))
        return values.to(device)

    def _mean_over_ranks(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(x) / self._group.world_size

    def _columns(
        self, module: str, parts: Sequence[Part], fused: str, *, bias: bool = False
    ) -> LinearWeights:
        return self._linears.columns(module, parts, self._hidden, fused=fused, bias=bias)

    def _out(self, module: str, spec: RecurrentSpec, *, bias: bool) -> LinearWeights:
        return self._linears.rows(module + spec.out, spec.inner, self._hidden, bias=bias)

    def _own(self, name: str, heads: int) -> Tensor:
        """A number for each of the rank's heads, float32.

        The file may have them in float32, and rates would lose bits in the model's dtype.
        """
        first, end = Columns("", heads).span(self._group.rank, self._group.world_size)
        return self._weights.replicated(name, heads, dtype=torch.float32)[first:end].clone()

    def _projections(self, module: str, spec: DeltaNetSpec) -> tuple[LinearWeights, ...]:
        keys, values, per_key = spec.num_keys, spec.num_values, spec.num_values // spec.num_keys
        linears: list[tuple[tuple[Part, ...], str | None]]
        width = 2 * (spec.key_dim + per_key * spec.value_dim)
        if spec.by_head:
            linears = [
                ((Part("in_proj_qkvz", keys, width),), None),
                ((Part("in_proj_ba", keys, 2 * per_key),), None),
            ]
        else:
            key, value = Part("", keys, spec.key_dim), Part("", values, spec.value_dim)
            linears = [
                ((key, key, value), "in_proj_qkv"),
                ((Part("in_proj_z", values, spec.value_dim),), None),
                ((Part("in_proj_b", values),), None),
                ((Part("in_proj_a", values),), None),
            ]
        return tuple(
            self._linears.columns(module, parts, self._hidden, fused=fused, bias=False)
            for parts, fused in linears
        )

    def _heads(self, module: str, spec: DeltaNetSpec) -> DeltaHeads:
        ranks, keys = self._group.world_size, spec.num_keys
        key, value = (
            Part("", keys, spec.key_dim),
            Part("", spec.num_values, spec.value_dim),
        )
        conv = self._conv(f"{module}conv1d", (key, key, value), spec.kernel, bias=False, silu=True)
        return DeltaHeads(
            num_keys=spec.num_keys // ranks,
            num_values=spec.num_values // ranks,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            conv=conv.weight,
            rates=self._own(f"{module}A_log", spec.num_values).exp(),
            dt_bias=self._own(f"{module}dt_bias", spec.num_values),
            norm=self._weights.replicated(f"{module}norm.weight", spec.value_dim),
            eps=spec.eps,
        )

    def _conv(
        self, name: str, parts: Sequence[Part], kernel: int, *, bias: bool, silu: bool
    ) -> ConvWeights:
        """The rank's channels, which are split as `parts`."""
        channels, first = list[Tensor](), 0
        for part in parts:
            columns = Columns("", part.units, part.unit_size, first)
            start, end = columns.span(self._group.rank, self._group.world_size)
            channels.append(torch.arange(start, end))
            first += part.units * part.unit_size
        own = torch.cat(channels)
        weight = self._weights.replicated(f"{name}.weight", first, 1, kernel)
        own = own.to(weight.device)
        added = self._weights.replicated(f"{name}.bias", first)[own].float() if bias else None
        return ConvWeights(
            weight=weight[own, 0].t().float().contiguous(),
            bias=weight.new_empty(0, dtype=torch.float32) if added is None else added,
            silu=silu,
        )
