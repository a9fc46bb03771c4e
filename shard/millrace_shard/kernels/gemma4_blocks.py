"""What Gemma 4's layers have in addition to attention and a dense feed-forward half, of single operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.expert_weights import ExpertsWeights
from millrace_shard.kernels.layer_blocks import ComposedExperts, ComposedMlp
from millrace_shard.kernels.layer_weights import (
    Activation,
    LinearWeights,
    MlpWeights,
    NormWeights,
    gate_function,
)

AVERAGE = 2.0**-0.5
"""The factor of the sum of both parts of a layer's input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputsWeights:
    """The linear and the embedding that make a further input of every layer; ranks have all layers' channels."""

    project: LinearWeights
    """[layers * dim, hidden]."""
    norm: NormWeights
    """[dim]."""
    dim: int


class LayerInputs:
    """Makes the inputs of all layers."""

    def __init__(self, kernels: Kernels, weights: LayerInputsWeights) -> None:
        self._project = kernels.linear_from(weights.project)
        self._norm, self._dim = weights.norm, weights.dim

    def __call__(self, embedded: Tensor, rows: Tensor) -> Tensor:
        """[T, layers, dim], from embeddings [T, hidden], scaled, and from rows [T, layers * dim] of the own table."""
        shape = len(rows), -1, self._dim
        projected = self._project(embedded) * embedded.shape[1] ** -0.5
        scale = torch.tensor(self._dim**0.5, dtype=rows.dtype)
        summands = self._norm.apply(projected.view(shape)), rows.view(shape) * scale
        return (summands[0] + summands[1]) * AVERAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class InputGateWeights:
    """What a layer makes of its further input; every rank has all of it."""

    index: int
    """The layer."""
    gate: LinearWeights
    """[dim, hidden]."""
    out: LinearWeights
    """[hidden, dim]."""
    norm: NormWeights
    """[hidden]."""
    activation: Activation


class ScaledEnd:
    """Adds what a layer makes of its further input, if it has one, then multiplies the state by a number."""

    def __init__(
        self, kernels: Kernels, weights: InputGateWeights | None, scalar: Tensor | None
    ) -> None:
        """`scalar` is [1]; None leaves the state as it is."""
        self._input = None if weights is None else _InputGate(kernels, weights)
        self._scalar = scalar

    def __call__(self, x: Tensor, residual: Tensor, inputs: Tensor | None) -> Tensor:
        """Zeros [T, hidden], since `residual` has everything."""
        residual += x
        if self._input is not None:
            assert inputs is not None
            residual += self._input(residual, inputs)
        if self._scalar is not None:
            residual *= self._scalar
        return torch.zeros_like(residual)


class _InputGate:
    def __init__(self, kernels: Kernels, weights: InputGateWeights) -> None:
        self._index, self._norm = weights.index, weights.norm
        self._gate = kernels.linear_from(weights.gate)
        self._out = kernels.linear_from(weights.out)
        self._activate = gate_function(kernels, weights.activation)

    def __call__(self, x: Tensor, inputs: Tensor) -> Tensor:
        gated = torch.cat([self._gate(x), inputs[:, self._index]], dim=1)
        return self._norm.apply(self._out(self._activate(gated)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideWeights:
    """A dense feed-forward half and experts that read the same state; each has its own norms."""

    mlp: MlpWeights
    after_mlp: NormWeights
    router_norm: NormWeights
    """[hidden]: of the router's inputs."""
    before_experts: NormWeights
    experts: ExpertsWeights
    after_experts: NormWeights


class MlpBesideExperts:
    """The sum of a dense half and of experts, after the norm of each."""

    def __init__(
        self,
        kernels: Kernels,
        weights: BesideWeights,
        reduce: Callable[[Tensor], Tensor] | None,
        *,
        is_first: bool,
    ) -> None:
        """`reduce` sums over the ranks, of which one `is_first`."""
        self._mlp = ComposedMlp(kernels, weights.mlp)
        self._after_mlp, self._after_experts = weights.after_mlp, weights.after_experts
        self._router_norm, self._before_experts = weights.router_norm, weights.before_experts
        self._experts = ComposedExperts(kernels, weights.experts)
        self._reduce, self._is_first = reduce, is_first

    def __call__(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """[T, hidden]; `residual` is changed in place. Norms need whole sums, so only the first rank has a result."""
        dense = self._mlp(x, residual)
        routed = self._experts(
            self._before_experts.apply(residual), self._router_norm.apply(residual)
        )
        if self._reduce is not None:
            dense, routed = self._reduce(torch.cat([dense, routed], dim=1)).chunk(2, dim=1)
        y = self._after_mlp.apply(dense) + self._after_experts.apply(routed)
        return y if self._is_first else torch.zeros_like(y)
