"""Reads a rank's part of the experts of a layer: a module for each, or tensors that stack all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.experts.expert_weights import (
    ExpertsWeights,
    ExpertWeights,
    MixtureWeights,
    RouterWeights,
    SharedExpertWeights,
)
from millrace_shard.kernels.layer.layer_weights import LinearWeights
from millrace_shard.kernels.layer.norm_weights import NormWeights
from millrace_shard.kernels.quantized.quantized_tensor import QuantizedTensor
from millrace_shard.kernels.stored_weight import StoredWeight
from millrace_shard.models.linear_loader import LinearLoader, Part
from millrace_shard.models.spec.feed_forward_spec import ExpertsSpec, RouterSpec, SharedExpertSpec
from millrace_shard.models.spec.weight_names import ExpertNames
from millrace_shard.weights.weights import Weights


class ExpertsLoader:
    """Reads routers, experts and shared experts. Of each expert a rank has a part of the intermediate channels.

    Routed experts are parameters in transformers' classes, no modules, so adapters cannot target them; the linears of
    shared experts can be targets.
    """

    def __init__(
        self, hidden_size: int, weights: Weights, linears: LinearLoader, group: ProcessGroup
    ) -> None:
        """`linears` reads the linears of shared experts."""
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
        found = next(has_router, names[0])
        router = self._router(prefix + found.router, spec.router)
        shared = None if spec.shared is None else self._shared(prefix, spec.shared, found)
        return MixtureWeights(
            norm=norm,
            experts=ExpertsWeights(
                router=router,
                experts=self._experts(prefix, spec, found),
                activation=spec.activation,
                inter=spec.intermediate_size // self._group.world_size,
                dtype=self._weights.dtype,
            ),
            shared=shared,
        )

    def _router(self, name: str, spec: RouterSpec) -> RouterWeights:
        weights, count = self._weights, spec.num_experts
        wide = partial(weights.replicated, dtype=torch.float32)
        return RouterWeights(
            weight=wide(f"{name}.weight", count, self._hidden),
            bias=wide(f"{name}.bias", count) if spec.bias else None,
            correction=wide(f"{name}.e_score_correction_bias", count) if spec.correction else None,
            rule=spec.rule,
        )

    def _shared(
        self, prefix: str, spec: SharedExpertSpec, names: ExpertNames
    ) -> SharedExpertWeights:
        linears, inter = self._shared_linears, spec.mlp.intermediate_size
        gate, up, down = (
            f"{names.shared}.{name}" for name in ("gate_proj", "up_proj", "down_proj")
        )
        columns = partial(linears.columns, prefix, inputs=self._hidden, fused=None, bias=False)
        return SharedExpertWeights(
            gate_up=columns((Part(gate, inter), Part(up, inter))),
            down=linears.rows(prefix + down, inter, self._hidden, bias=False),
            activation=spec.mlp.activation,
            gate=columns((Part(names.shared_gate, 1),)) if spec.gated else None,
        )

    def _experts(
        self, prefix: str, spec: ExpertsSpec, names: ExpertNames
    ) -> Iterator[ExpertWeights]:
        """One expert after the other; the pages of the last one are released before the next one is read."""
        own = f"{prefix}{names.experts}."
        read: Callable[[int], ExpertWeights]
        stacked = own + names.stacked_gate_up
        if stacked in self._weights or self._weights.has_stacked_codes(stacked):
            read = _StackedExperts(self._weights, self._group, own, self._hidden, spec, names)
        else:
            read = partial(self._expert, own, spec, names)
        for index in range(spec.router.num_experts):
            yield read(index)
            self._weights.release()

    def _expert(self, own: str, spec: ExpertsSpec, names: ExpertNames, index: int) -> ExpertWeights:
        prefix, inter = f"{own}{index}.", spec.intermediate_size
        parts = Part(names.gate, inter), Part(names.up, inter)
        return ExpertWeights(
            gate_up=self._linears.columns(prefix, parts, self._hidden, fused=None, bias=spec.bias),
            down=self._linears.rows(prefix + names.down, inter, self._hidden, bias=spec.bias),
        )


class _StackedExperts:
    """Reads experts from tensors that stack all of them."""

    def __init__(
        self,
        weights: Weights,
        group: ProcessGroup,
        own: str,
        hidden: int,
        spec: ExpertsSpec,
        names: ExpertNames,
    ) -> None:
        """`own` is the prefix of the tensors."""
        self._weights = weights
        self._gate_up, self._down = own + names.stacked_gate_up, own + names.stacked_down
        self._transposed = names.transposed
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
        """The rank's part of an expert."""
        gate_up_bias = down_bias = None
        if self._biases is not None:
            gate_up_bias = torch.cat([self._biases[0][index][rows] for rows in self._gates_and_ups])
            down_bias = None if self._biases[1] is None else self._biases[1][index].contiguous()
        return ExpertWeights(
            gate_up=LinearWeights(self._gate_up_of(index), gate_up_bias),
            down=LinearWeights(self._down_of(index), down_bias),
        )

    def _gate_up_of(self, index: int) -> StoredWeight:
        whole = slice(0, self._hidden)
        return self._weights.stored(
            *(
                self._part(self._gate_up, 2 * self._inter, self._hidden, index, rows, whole)
                for rows in self._gates_and_ups
            )
        )

    def _down_of(self, index: int) -> StoredWeight:
        rows = slice(0, self._hidden)
        return self._weights.stored(
            self._part(self._down, self._hidden, self._inter, index, rows, self._channels)
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
        """One expert's weight [outputs, inputs]."""
        if not self._transposed:
            return self._weights.stacked(name, (self._count, outputs, inputs), index)
        return self._weights.stacked(name, (self._count, inputs, outputs), index).t()

    @property
    def _gates_and_ups(self) -> tuple[slice, slice]:
        """The rank's rows of gates and of ups."""
        first, end = self._channels.start, self._channels.stop
        if self._transposed:
            return slice(2 * first, 2 * end, 2), slice(2 * first + 1, 2 * end, 2)
        return slice(first, end), slice(self._inter + first, self._inter + end)
