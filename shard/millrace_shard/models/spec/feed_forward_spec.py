"""The feed-forward half of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Activation(Enum):
    """The function of the gates."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    """GELU by its tanh approximation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedSpec:
    """`down(activation(gate) * up)`."""

    intermediate_size: int
    activation: Activation = Activation.SILU
    bias: bool = False


FeedForwardSpec = GatedSpec
