"""The functions of gates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.kernels.elementwise import elementwise


class Activation(Enum):
    """The function of the gates of a feed-forward half."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    """GELU by its tanh approximation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedSwiglu:
    """`(up + 1) * gate * sigmoid(alpha * gate)`, after gates are clamped from above and ups from both sides."""

    alpha: float
    limit: float


def gate_function(
    silu_mul: Callable[[Tensor], Tensor], activation: Activation | ClampedSwiglu
) -> Callable[[Tensor], Tensor]:
    """The function of `gate_up` [T, 2 * inter], gates first; `silu_mul` is that of the kernels."""
    if isinstance(activation, ClampedSwiglu):
        return partial(clamped_swiglu, activation)
    return silu_mul if activation is Activation.SILU else gelu_mul


def clamped_swiglu(activation: ClampedSwiglu, gate_up: Tensor) -> Tensor:
    """The activation of `gate_up` [T, 2 * inter], gates first, in float32: [T, inter] in the dtype of `gate_up`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    scaled = gate * activation.alpha
    is_cpu = scaled.device.type == "cpu"
    share = elementwise(torch.sigmoid, scaled) if is_cpu else scaled.sigmoid()
    return ((up + 1) * (gate * share)).to(gate_up.dtype)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` of `gate_up` [T, 2 * inter], gates first, by the tanh approximation."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gate.device.type != "cpu":
        return F.gelu(gate, approximate="tanh") * up
    return elementwise(lambda x: F.gelu(x, approximate="tanh"), gate) * up
