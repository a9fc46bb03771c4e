"""The functions of gates."""

from __future__ import annotations

from enum import Enum

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.kernels.elementwise import elementwise


class Activation(Enum):
    """The function of the gates of a feed-forward half."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    """GELU by its tanh approximation."""


def gelu_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` of `gate_up` [T, 2 * inter], gates first, by the tanh approximation."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gate.device.type != "cpu":
        return F.gelu(gate, approximate="tanh") * up
    return elementwise(lambda x: F.gelu(x, approximate="tanh"), gate) * up
