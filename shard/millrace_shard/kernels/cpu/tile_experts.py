"""The experts of a layer as a single operator over tiles, for bfloat16 models.

Weights are bfloat16, or codes of 4 or 8 bits, which stay as they are; the experts of a layer may have different forms.
With `integer`, codes are multiplied with activations in int8, if they stand for integers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from millrace_shard.kernels.cpu.packed_weight import packed
from millrace_shard.kernels.cpu.tile_blocks import TILE_COLUMNS, TILE_DEPTH
from millrace_shard.kernels.experts.expert_weights import ExpertsWeights
from millrace_shard.kernels.experts.routing import Scoring
from millrace_shard.kernels.layer.activation import Activation, ClampedSwiglu

MOST_GROUPS = 64
"""Groups of experts that the operator takes."""

logger = logging.getLogger(__name__)


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

    def __init__(self, weights: ExpertsWeights, *, integer: bool = False) -> None:
        hidden, inter = weights.router.weight.shape[1], weights.inter
        # Log lines are for each reason, not for each expert.
        reasons: dict[str, None] = {}
        gates_ups, downs = [], []
        for expert in weights.experts:
            gates_ups.append(
                packed(expert.gate_up, integer=integer, gated=True, warn=reasons.setdefault)
            )
            downs.append(packed(expert.down, integer=integer, warn=reasons.setdefault))
        for reason in reasons:
            logger.warning("experts: %s", reason)
        self._weights = [weight for weight, _ in (*gates_ups, *downs)]
        """What the tables refer to."""
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
            *_table(gates_ups, hidden, 2 * inter),
            *_table(downs, inter, hidden),
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


def _table(
    linears: Sequence[tuple[Tensor, Tensor]], inputs: int, outputs: int
) -> tuple[Tensor, Tensor]:
    """The operator's table of the weights, and the biases [E, outputs], or empty if there are none."""
    table = torch.ops.millrace.expert_table([weight for weight, _ in linears], inputs, outputs)
    biases = [bias for _, bias in linears if bias.numel() > 0]
    return table, torch.stack(biases) if biases else torch.empty(0, dtype=torch.bfloat16)
