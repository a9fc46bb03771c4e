"""One rank's part of the weights of a mixture of experts, before kernels have packed or copied them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from millrace_shard.kernels.experts.routing import RoutingRule
from millrace_shard.kernels.layer.activation import Activation, ClampedSwiglu
from millrace_shard.kernels.layer.layer_weights import LinearWeights
from millrace_shard.kernels.layer.norm_weights import NormWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterWeights:
    """The linear that scores all experts, in float32, and the rule that chooses by the scores."""

    weight: Tensor
    """[E, hidden] float32."""
    bias: Tensor | None
    """[E] float32."""
    correction: Tensor | None
    """[E] float32, see `RoutingRule.choose`."""
    rule: RoutingRule


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """One expert."""

    gate_up: LinearWeights
    """[2 * inter, hidden], gates first."""
    down: LinearWeights
    """[hidden, inter]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsWeights:
    """The experts of a layer and their router."""

    router: RouterWeights
    experts: Iterable[ExpertWeights]
    """One after the other, of equal shapes. The weights of one are valid until the next one is asked for."""
    activation: Activation | ClampedSwiglu
    inter: int
    """Intermediate channels of an expert on this rank."""
    dtype: torch.dtype

    @property
    def num_experts(self) -> int:
        """The number of experts."""
        return len(self.router.weight)

    def peeked(self) -> tuple[ExpertWeights, ExpertsWeights]:
        """The first expert, and the weights with it as if it had not been asked for."""
        experts = iter(self.experts)
        first = next(experts)
        return first, replace(self, experts=itertools.chain((first,), experts))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpertWeights:
    """An expert that all tokens have."""

    gate_up: LinearWeights
    down: LinearWeights
    activation: Activation
    gate: LinearWeights | None
    """[1, hidden]: the result is multiplied by the sigmoid of it; None: the result stays as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureWeights:
    """The second half of a layer with experts."""

    norm: NormWeights | None
    """[hidden]; None: the half reads the residual as it is."""
    experts: ExpertsWeights
    shared: SharedExpertWeights | None
