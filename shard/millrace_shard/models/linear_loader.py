"""Reads a rank's part of the linears and experts of a layer; linears become sites of the adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.expert_weights import (
    ExpertsWeights,
    ExpertWeights,
    MixtureWeights,
    RouterWeights,
    SharedExpertWeights,
)
from millrace_shard.kernels.layer_weights import Activation, LinearWeights, NormWeights
from millrace_shard.kernels.lora.adapter_table import AdapterTable, LoraPart, LoraSite
from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_shard.kernels.stored_weight import StoredWeight
from millrace_shard.models.spec import ExpertNames, ExpertsSpec, RouterSpec, SharedExpertSpec
from millrace_shard.weights.weights import Columns, Weights


@dataclass(frozen=True, slots=True)
class Part:
    """Outputs of a column-parallel linear: `units` of `unit_size`, split over the ranks by units."""

    name: str
    """The module of the part, relative to the layer."""
    units: int
    unit_size: int = 1


class LinearLoader:
    """Reads weights and biases, and adds the sites in order of execution."""

    def __init__(
        self, weights: Weights, group: ProcessGroup, adapters: AdapterTable | None
    ) -> None:
        self._weights = weights
        self._group = group
        self._adapters = adapters

    def columns(
        self,
        prefix: str,
        parts: Sequence[Part],
        inputs: int,
        *,
        fused: str | None,
        bias: bool,
    ) -> LinearWeights:
        """A column-parallel linear of `parts`, which the file has in one module if `fused` names it."""
        total = sum(part.units * part.unit_size for part in parts)
        columns, first = [], 0
        for part in parts:
            size = part.units * part.unit_size
            if fused is None:
                columns.append(Columns(prefix + part.name, part.units, part.unit_size))
            else:
                columns.append(Columns(prefix + fused, part.units, part.unit_size, first, total))
            first += size
        return LinearWeights(
            self._weights.columns([each.of("weight") for each in columns], inputs),
            self._weights.biases([each.of("bias") for each in columns]) if bias else None,
            self._column_site(columns, inputs),
        )

    def rows(self, name: str, inputs: int, outputs: int, *, bias: bool) -> LinearWeights:
        """A row-parallel linear. The results of the ranks are summed, so only rank 0 adds the bias."""
        whole = self._weights.replicated(f"{name}.bias", outputs) if bias else None
        return LinearWeights(
            self._weights.rows(f"{name}.weight", outputs, inputs),
            whole if self._group.rank == 0 else None,
            self._row_site(name, inputs, outputs),
        )

    def dense(self, name: str, heads: int, outputs: int, inputs: int) -> Tensor:
        """The rank's heads of a weight as numbers of the model's dtype, [heads, outputs, inputs]."""
        part = Columns(f"{name}.weight", heads, outputs)
        return self._weights.dense(part, inputs).view(-1, outputs, inputs)

    def own_heads(self, name: str, heads: int, head_dim: int) -> Tensor:
        """The rank's heads of a tensor [heads, head_dim] or [heads * head_dim], in the shape of the file."""
        return self._weights.heads(name, Columns(name, heads, head_dim))

    def head_site(self, name: str, vocab_size: int, inputs: int, share: int) -> LoraSite | None:
        """The site of an output head of which each rank has `share` outputs."""
        if self._adapters is None:
            return None
        start = min(self._group.rank * share, vocab_size)
        part = LoraPart(
            name=name,
            inputs=inputs,
            outputs=vocab_size,
            input_range=(0, inputs),
            output_range=(start, min(start + share, vocab_size)),
        )
        return self._adapters.add_site([part], is_head=True)

    def _column_site(self, parts: Sequence[Columns], inputs: int) -> LoraSite | None:
        if self._adapters is None:
            return None
        lora_parts, first = list[LoraPart](), 0
        for part in parts:
            start, end = part.span(self._group.rank, self._group.world_size)
            lora_parts.append(
                LoraPart(
                    name=part.name,
                    inputs=inputs,
                    outputs=part.rows,
                    input_range=(0, inputs),
                    output_range=(start, end),
                    first_output=first,
                )
            )
            first += end - start
        return self._adapters.add_site(lora_parts)

    def _row_site(self, name: str, inputs: int, outputs: int) -> LoraSite | None:
        if self._adapters is None:
            return None
        rank = self._group.rank
        share = inputs // self._group.world_size
        part = LoraPart(
            name=name,
            inputs=inputs,
            outputs=outputs,
            input_range=(rank * share, (rank + 1) * share),
            output_range=(0, outputs),
            adds_bias=rank == 0,
        )
        return self._adapters.add_site([part])


class ExpertsLoader:
    """Reads routers, experts and shared experts. Of each expert a rank has a part of the intermediate channels.

    Routed experts are parameters in transformers' classes, no modules, so adapters cannot target them; the linears of
    shared experts can be targets.
    """

    def __init__(
        self, hidden_size: int, weights: Weights, linears: LinearLoader, group: ProcessGroup
    ) -> None:
        self._hidden = hidden_size
        self._weights = weights
        self._shared_linears = linears
        self._linears = LinearLoader(weights, group, None)
        self._group = group

    def read(
        self,
        prefix: str,
        spec: ExpertsSpec,
        names: Sequence[ExpertNames],
        norm: NormWeights | None,
    ) -> MixtureWeights:
        """The experts of the layer with this prefix, by the first of `names` that the file has a router for."""
        has_router = (each for each in names if f"{prefix}{each.router}.weight" in self._weights)
        expert_names = next(has_router, names[0])
        router = self._router(prefix, expert_names, spec.router)
        shared = None if spec.shared is None else self._shared(prefix, spec.shared, expert_names)
        return MixtureWeights(
            norm=norm,
            experts=ExpertsWeights(
                router=router,
                experts=self._experts(prefix, spec, expert_names),
                activation=spec.activation,
                inter=spec.intermediate_size // self._group.world_size,
                dtype=self._weights.dtype,
                scales_inputs=spec.scales_inputs,
                latent=self._latent(prefix, spec.latent_size, expert_names),
            ),
            shared=shared,
        )

    def _router(self, prefix: str, names: ExpertNames, spec: RouterSpec) -> RouterWeights:
        weights, count, name = self._weights, spec.num_experts, prefix + names.router
        wide = partial(weights.replicated, dtype=torch.float32)
        correction = None
        if spec.correction:
            corrected = prefix + names.correction_tensor
            # ERNIE has an axis for groups, of which there is one.
            axes = (1, count) if weights.files.shape(corrected) == (1, count) else (count,)
            correction = wide(corrected, *axes).view(-1)
        return RouterWeights(
            weight=wide(f"{name}.weight", count, self._hidden),
            bias=wide(f"{name}.bias", count) if spec.bias else None,
            correction=correction,
            rule=spec.rule,
        )

    def _shared(
        self, prefix: str, spec: SharedExpertSpec, names: ExpertNames
    ) -> SharedExpertWeights:
        linears, inter = self._shared_linears, spec.mlp.intermediate_size
        module, fused = f"{names.shared}.", names.shared_gate_up
        gate_up = [Part(f"{module}gate_proj", inter), Part(f"{module}up_proj", inter)]
        if not spec.mlp.activation.has_gate:
            del gate_up[0]
        columns = partial(linears.columns, prefix, inputs=self._hidden, bias=False)
        return SharedExpertWeights(
            gate_up=columns(gate_up, fused=None if fused is None else module + fused),
            down=linears.rows(prefix + module + names.shared_down, inter, self._hidden, bias=False),
            activation=spec.mlp.activation,
            gate=columns((Part(names.shared_gate, 1),), fused=None) if spec.gated else None,
        )

    def _latent(
        self, prefix: str, size: int | None, names: ExpertNames
    ) -> tuple[LinearWeights, LinearWeights] | None:
        """Every rank has both linears whole: the second one's results for the ranks' parts of a latent add up."""
        if size is None:
            return None
        columns = partial(self._shared_linears.columns, prefix, fused=None, bias=False)
        return (
            columns((Part(names.latent_in, 1, size),), inputs=self._hidden),
            columns((Part(names.latent_out, 1, self._hidden),), inputs=size),
        )

    def _experts(
        self, prefix: str, spec: ExpertsSpec, names: ExpertNames
    ) -> Iterator[ExpertWeights]:
        """One expert after the other; the pages of the last one are released before the next one is read."""
        module = f"{prefix}{names.experts}."
        read: Callable[[int], ExpertWeights]
        stacked = module + names.stacked_gate_up
        if names.in_a_row:
            read = partial(self._in_a_row, module, spec, names)
        elif stacked in self._weights or self._weights.has_stacked_codes(stacked):
            width = spec.latent_size or self._hidden
            read = _StackedExperts(self._weights, self._group, module, width, spec, names)
        else:
            read = partial(self._expert, module, spec, names)
        for index in range(spec.router.num_experts):
            yield read(index)
            self._weights.release()

    def _expert(
        self, module: str, spec: ExpertsSpec, names: ExpertNames, index: int
    ) -> ExpertWeights:
        prefix, inter = f"{module}{index}.", spec.intermediate_size
        width = spec.latent_size or self._hidden
        parts = [Part(names.gate, inter), Part(names.up, inter)]
        if spec.activation is Activation.RELU_SQUARED:
            del parts[0]
        return ExpertWeights(
            gate_up=self._linears.columns(prefix, parts, width, fused=None, bias=spec.bias),
            down=self._linears.rows(prefix + names.down, inter, width, bias=spec.bias),
        )

    def _in_a_row(
        self, module: str, spec: ExpertsSpec, names: ExpertNames, index: int
    ) -> ExpertWeights:
        """One expert of tensors [E * inter, hidden]; down projections are transposed."""
        inter, weights = spec.intermediate_size, self._weights
        share = inter // self._group.world_size
        first = index * inter + self._group.rank * share
        total = spec.router.num_experts * inter
        gate, up, down = (
            partial(weights.span, module + name, (total, self._hidden), (first, first + share))
            for name in (names.gate, names.up, names.down)
        )
        shapes = (2 * share, self._hidden), (self._hidden, share)
        gate_up = weights.stored(module + names.gate, index, shapes[0], lambda: (gate(), up()))
        downs = weights.stored(module + names.down, index, shapes[1], lambda: (down().t(),))
        return ExpertWeights(gate_up=LinearWeights(gate_up), down=LinearWeights(downs))


class _StackedExperts:
    """Reads experts from tensors that stack all of them."""

    def __init__(
        self,
        weights: Weights,
        group: ProcessGroup,
        module: str,
        hidden: int,
        spec: ExpertsSpec,
        names: ExpertNames,
    ) -> None:
        self._weights = weights
        self._gate_up, self._down = module + names.stacked_gate_up, module + names.stacked_down
        self._transposed, self._alternating = names.transposed, names.alternating
        self._count, self._inter, self._hidden = (
            spec.router.num_experts,
            spec.intermediate_size,
            hidden,
        )
        share = self._inter // group.world_size
        self._channels = slice(group.rank * share, (group.rank + 1) * share)
        self._biases: tuple[Tensor, Tensor | None] | None = None
        if spec.bias:
            gate_up = weights.replicated(f"{self._gate_up}_bias", self._count, 2 * self._inter)
            down = weights.replicated(f"{self._down}_bias", self._count, hidden)
            # The results of the ranks are summed, so only rank 0 adds the bias.
            self._biases = gate_up, down if group.rank == 0 else None

    def __call__(self, index: int) -> ExpertWeights:
        gate_up_bias = down_bias = None
        if self._biases is not None:
            gate_up_bias = torch.cat([self._biases[0][index][rows] for rows in self._gates_and_ups])
            down_bias = None if self._biases[1] is None else self._biases[1][index].contiguous()
        return ExpertWeights(
            gate_up=LinearWeights(self._gate_up_of(index), gate_up_bias),
            down=LinearWeights(self._down_of(index), down_bias),
        )

    def _gate_up_of(self, index: int) -> StoredWeight:
        whole, width = slice(0, self._hidden), self._channels.stop - self._channels.start
        return self._weights.stored(
            self._gate_up,
            index,
            (2 * width, self._hidden),
            lambda: (
                self._part(self._gate_up, 2 * self._inter, self._hidden, index, rows, whole)
                for rows in self._gates_and_ups
            ),
        )

    def _down_of(self, index: int) -> StoredWeight:
        rows, width = slice(0, self._hidden), self._channels.stop - self._channels.start
        return self._weights.stored(
            self._down,
            index,
            (self._hidden, width),
            lambda: [
                self._part(self._down, self._hidden, self._inter, index, rows, self._channels)
            ],
        )

    def _part(
        self, name: str, outputs: int, inputs: int, index: int, rows: slice, columns: slice
    ) -> Tensor | QuantizedTensor:
        """Rows and columns of one expert's weight [outputs, inputs]."""
        shape, span = (self._count, outputs, inputs), (columns.start, columns.stop)
        codes = self._weights.stacked_codes(name, shape, index, rows=rows, columns=span)
        if codes is not None:
            return codes
        return self._matrix(name, outputs, inputs, index)[rows, columns]

    def _matrix(self, name: str, outputs: int, inputs: int, index: int) -> Tensor:
        swapped = self._count, inputs, outputs
        # transformers also writes Qwen 3 VL's with the axes in their usual order.
        if not self._transposed or self._weights.files.shape(name) != swapped:
            return self._weights.stacked(name, (self._count, outputs, inputs), index)
        return self._weights.stacked(name, swapped, index).t()

    @property
    def _gates_and_ups(self) -> tuple[slice, slice]:
        first, end = self._channels.start, self._channels.stop
        if self._alternating:
            return slice(2 * first, 2 * end, 2), slice(2 * first + 1, 2 * end, 2)
        return slice(first, end), slice(self._inter + first, self._inter + end)
