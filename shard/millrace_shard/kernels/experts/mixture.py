"""The second half of a layer with experts."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.elementwise import elementwise
from millrace_shard.kernels.experts.expert_weights import MixtureWeights, SharedExpertWeights
from millrace_shard.kernels.layer.activation import gate_function
from millrace_shard.kernels.layer.normalised import added_and_normalised


class Mixture:
    """Norm, the experts that a router chooses, and perhaps an expert that all tokens have."""

    def __init__(self, kernels: Kernels, weights: MixtureWeights) -> None:
        self._kernels = kernels
        self._norm = weights.norm
        # Its weights are valid until the first expert is read.
        self._shared = None if weights.shared is None else SharedExpert(kernels, weights.shared)
        self._experts = kernels.experts(weights.experts)

    def __call__(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """[T, hidden]; `residual` is changed in place."""
        normed = added_and_normalised(self._kernels, x, residual, self._norm)
        y = self._experts(normed)
        return y if self._shared is None else y + self._shared(normed)


class SharedExpert:
    """An expert that all tokens have, of single operators."""

    def __init__(self, kernels: Kernels, weights: SharedExpertWeights) -> None:
        self._gate_up = kernels.linear_from(weights.gate_up)
        self._down = kernels.linear_from(weights.down)
        self._activate = gate_function(kernels.silu_mul, weights.activation)
        self._gate = None if weights.gate is None else kernels.linear_from(weights.gate)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        y = self._down(self._activate(self._gate_up(x)))
        if self._gate is None:
            return y
        gate = self._gate(x)
        share = elementwise(torch.sigmoid, gate) if gate.device.type == "cpu" else gate.sigmoid()
        return y * share
