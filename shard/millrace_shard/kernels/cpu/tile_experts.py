"""The experts of a layer as a single operator over tiles, for bfloat16 weights."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_shard.kernels.cpu.packed_weight import unpacked_parts
from millrace_shard.kernels.cpu.tile_blocks import TILE_COLUMNS, TILE_DEPTH
from millrace_shard.kernels.experts.expert_weights import ExpertsWeights
from millrace_shard.kernels.experts.routing import Scoring
from millrace_shard.kernels.layer.activation import Activation, ClampedSwiglu

MOST_GROUPS = 64
"""Groups of experts that the operator takes."""


def fits_experts(weights: ExpertsWeights) -> bool:
    """Whether TiledExperts takes these weights."""
    return (
        weights.dtype == torch.bfloat16
        and weights.router.weight.shape[1] % TILE_DEPTH == 0
        and weights.inter % TILE_COLUMNS == 0
        and weights.router.rule.num_groups <= MOST_GROUPS
        and weights.activation is not Activation.GELU_TANH
    )


class TiledExperts:
    """Router, experts and their sum in one parallel region. A row's bits depend on the row alone."""

    def __init__(self, weights: ExpertsWeights) -> None:
        count, hidden = weights.router.weight.shape
        gate_up = torch.ops.millrace.new_panels(count, 2 * weights.inter, hidden)
        down = torch.ops.millrace.new_panels(count, hidden, weights.inter)
        biases: tuple[list[Tensor], list[Tensor]] = ([], [])
        for index, expert in enumerate(weights.experts):
            for panels, linear, own in zip(
                (gate_up, down), (expert.gate_up, expert.down), biases, strict=True
            ):
                parts = unpacked_parts(linear.weight)
                torch.ops.millrace.pack_into(panels[index], parts, panels is gate_up)
                if linear.bias is not None:
                    own.append(linear.bias)
        router, rule = weights.router, weights.router.rule
        scoring = list(Scoring).index(rule.scoring)
        self._router = (
            router.weight.contiguous(),
            _or_empty(router.bias),
            _or_empty(router.correction),
            [rule.top_k, scoring, int(rule.renormalise), rule.num_groups, rule.top_groups],
            rule.scale,
        )
        activation = weights.activation
        clamped = activation if isinstance(activation, ClampedSwiglu) else None
        self._experts = (
            gate_up,
            _stacked(biases[0]),
            down,
            _stacked(biases[1]),
            clamped.alpha if clamped else 1.0,
            clamped.limit if clamped else 0.0,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        x = x.contiguous()
        y = torch.empty_like(x)
        torch.ops.millrace.experts(y, x, *self._router, *self._experts)
        return y


def _or_empty(values: Tensor | None) -> Tensor:
    return torch.empty(0) if values is None else values.contiguous()


def _stacked(biases: list[Tensor]) -> Tensor:
    """[E, outputs], or empty if there are none."""
    return torch.stack(biases) if biases else torch.empty(0, dtype=torch.bfloat16)
