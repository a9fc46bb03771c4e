"""Whether the operator of experts agrees with plain torch on the formats of a model, on a small mixture."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from millrace_shard.kernels.agreement import CPU, TOLERANCE, Random
from millrace_shard.kernels.base import Linear
from millrace_shard.kernels.cpu.coded_weight import has_integer_products
from millrace_shard.kernels.cpu.tile_experts import TiledExperts
from millrace_shard.kernels.experts import experts_agreement
from millrace_shard.kernels.experts.composed_experts import ComposedExperts
from millrace_shard.kernels.experts.expert_weights import ExpertWeights
from millrace_shard.kernels.experts.experts_agreement import Formats
from millrace_shard.kernels.layer.layer_weights import LinearWeights
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.quantized.code_format import CodeFormat
from millrace_shard.kernels.quantized.plain_linear import PlainQuantizedLinear
from millrace_shard.kernels.quantized.quantized_tensor import QuantizedTensor
from millrace_shard.kernels.stored_weight import StoredWeight

DTYPE = torch.bfloat16

logger = logging.getLogger(__name__)


def formats_of(expert: ExpertWeights) -> Formats:
    """The formats of the first parts of its linears."""
    return _format(expert.gate_up.weight), _format(expert.down.weight)


def _format(weight: StoredWeight) -> CodeFormat | None:
    part = weight.parts[0]
    return CodeFormat.of(part) if isinstance(part, QuantizedTensor) else None


@functools.cache
def codes_agree(formats: Formats, *, integer: bool) -> bool:
    """Whether results agree, and rows have the same bits alone; if not, a warning says so.

    The check of `agreement` has weights without codes.
    """
    if formats == (None, None):
        return True
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
    """The root mean square of the differences in the worst column of [T, hidden], relative to that of `theirs`.

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
