"""The feed-forward half of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from millrace_shard.kernels.layer.activation import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedSpec:
    """`down(activation(gate) * up)`."""

    intermediate_size: int
    activation: Activation = Activation.SILU
    bias: bool = False


FeedForwardSpec = GatedSpec
