"""The feed-forward half of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from millrace_shard.kernels.experts.routing import RoutingRule
from millrace_shard.kernels.layer.activation import Activation, ClampedSwiglu


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedSpec:
    """`down(activation(gate) * up)`."""

    intermediate_size: int
    activation: Activation = Activation.SILU
    bias: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of channels that ranks share."""
        return (self.intermediate_size,)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """The linear that scores experts, and the rule that chooses by the scores."""

    num_experts: int
    rule: RoutingRule
    bias: bool = False
    correction: bool = False
    """Whether experts are chosen by their scores plus a learned correction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpertSpec:
    """An expert that all tokens have."""

    mlp: GatedSpec
    gated: bool = False
    """Whether its result is multiplied by the sigmoid of a linear with one output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """The sum of the chosen experts, times their shares, and of a shared expert, if there is one."""

    router: RouterSpec
    intermediate_size: int
    """Of each expert."""
    activation: Activation | ClampedSwiglu = Activation.SILU
    bias: bool = False
    shared: SharedExpertSpec | None = None

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of channels that ranks share."""
        return self.intermediate_size, *(self.shared.mlp.widths if self.shared else ())


FeedForwardSpec = GatedSpec | ExpertsSpec
