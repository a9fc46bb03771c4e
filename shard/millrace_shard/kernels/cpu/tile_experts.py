"""The experts of a layer as a single operator over tiles, and its agreement with plain torch on quantised formats.

Weights are bfloat16, or codes of 4 or 8 bits, which stay as they are; the experts of a layer may have different forms.
With `integer`, codes are multiplied with activations in int8, if they stand for integers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from millrace_shard.kernels import experts_agreement
from millrace_shard.kernels.agreement import CPU, TOLERANCE, Random
from millrace_shard.kernels.base import Linear
from millrace_shard.kernels.cpu.packed_weight import has_integer_products, packed
from millrace_shard.kernels.cpu.tile_blocks import TILE_COLUMNS, TILE_DEPTH
from millrace_shard.kernels.expert_weights import ExpertsWeights, ExpertWeights, Scoring
from millrace_shard.kernels.experts_agreement import Formats
from millrace_shard.kernels.kept_results import kept_results
from millrace_shard.kernels.layer_blocks import ComposedExperts
from millrace_shard.kernels.layer_weights import Activation, ClampedSwiglu, LinearWeights
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.quantized import CodeFormat, PlainQuantizedLinear, QuantizedTensor
from millrace_shard.kernels.stored_weight import StoredWeight

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
        and weights.is_usual
        and weights.activation is not Activation.GELU_TANH
    )


class TiledExperts:
    """Router, experts and their sum in one parallel region. A row's bits depend only on the row."""

    def __init__(self, weights: ExpertsWeights, *, integer: bool = False) -> None:
        hidden, inter = weights.router.weight.shape[1], weights.inter
        gates_ups, downs = [], []
        for expert in weights.experts:
            gates_ups.append(packed(expert.gate_up, integer=integer, gated=True))
            downs.append(packed(expert.down, integer=integer))
        self._weights = [weight for weight, _ in (*gates_ups, *downs)]
        """Tensors whose memory the tables point to."""
        router, rule = weights.router, weights.router.rule
        scoring = list(Scoring).index(rule.scoring)
        self._router = (
            router.weight.contiguous(),
            _or_empty(router.bias),
            _or_empty(router.correction),
            [
                *(rule.top_k, scoring, int(rule.renormalise)),
                *(rule.num_groups, rule.top_groups, rule.group_members),
            ],
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


DTYPE = torch.bfloat16


def formats_of(expert: ExpertWeights) -> Formats:
    """The formats of the first parts of its linears."""
    return _format(expert.gate_up.weight), _format(expert.down.weight)


def _format(weight: StoredWeight) -> CodeFormat | None:
    part = weight.parts[0]
    return CodeFormat.of(part) if isinstance(part, QuantizedTensor) else None


@functools.cache
def codes_agree(formats: Formats, *, integer: bool) -> bool:
    """Whether results agree, and rows have the same bits alone; logs a warning if not.

    The check of `agreement` has weights without codes.
    """
    if formats == (None, None):
        return True
    name = f"experts {formats} {integer}"
    return kept_results().passed(name, lambda: _codes_agree(formats, integer=integer))


def _codes_agree(formats: Formats, *, integer: bool) -> bool:
    for rule in experts_agreement.RULES:
        ours, theirs = (
            experts_agreement.experts_weights(Random(DTYPE, CPU), DTYPE, rule, formats=formats)
            for _ in range(2)
        )
        experts = TiledExperts(ours, integer=integer)
        twin = ComposedExperts(_PlainCodes(integer=integer), theirs)
        x = Random(DTYPE, CPU)(max(experts_agreement.ROWS), experts_agreement.HIDDEN)
        whole = experts(x)
        is_close = difference(whole, twin(x.double())) <= TOLERANCE[DTYPE]
        same = (torch.equal(experts(x[:rows]), whole[:rows]) for rows in experts_agreement.ROWS)
        if not is_close or not all(same):
            sizes = [each and each.group_size for each in formats]
            logger.warning("experts one by one: the operator is wrong here for groups of %s", sizes)
            return False
    return True


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The root mean square of the differences in the worst column of [T, hidden], relative to the column's in `theirs`.

    A single activation that is rounded to the next integer of 8 bits changes a single row by more.
    """
    errors = (ours.double() - theirs.double()).square().mean(0).max()
    return float((errors / theirs.double().square().mean()).sqrt().nan_to_num(nan=torch.inf))


class _PlainCodes(PlainKernels):
    """Linears in float64, over codes or not, with activations as the operator has them."""

    def __init__(self, *, integer: bool) -> None:
        super().__init__(deterministic=True)
        self._integer = integer

    def linear_from(self, weights: LinearWeights) -> Linear:
        """The exact products of the codes with bfloat16."""
        (part,) = weights.weight.parts
        if not isinstance(part, QuantizedTensor):
            bias = None if weights.bias is None else weights.bias.double()
            linear = super().linear(part.double(), bias)
        else:
            integer = self._integer and has_integer_products(part)
            linear = PlainQuantizedLinear(part, weights.bias, integer=integer)
        return lambda x: linear(x.to(DTYPE).double())
