"""The weight of a linear, packed as the operators over tiles take it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from millrace_shard.kernels.cpu.coded_weight import packed_codes
from millrace_shard.kernels.layer.layer_weights import LinearWeights
from millrace_shard.kernels.quantized.quantized_tensor import QuantizedTensor
from millrace_shard.kernels.stored_weight import StoredWeight

logger = logging.getLogger(__name__)


def packed(
    weights: LinearWeights,
    *,
    integer: bool,
    gated: bool = False,
    warn: Callable[[str], object] = logger.warning,
) -> tuple[Tensor, Tensor]:
    """Packed weight and bias: codes stay codes, and are multiplied as `packed_codes` says.

    The weight is packed directly from the mapped file if it needs no conversion. `warn` gets the reason if codes have
    to be dequantised.
    """
    stored = weights.weight
    codes = [part for part in stored.parts if isinstance(part, QuantizedTensor)]
    bias = or_empty(weights.bias)
    if len(codes) == len(stored.parts):
        coded = packed_codes(codes, integer=integer, gated=gated, warn=warn)
        if coded is not None:
            return coded, bias
    elif codes:
        warn("dequantized: some parts of a fused linear have no codes")
    return torch.ops.millrace.pack_panels(_unpacked_parts(stored), gated), bias


def _unpacked_parts(weight: StoredWeight) -> Sequence[Tensor]:
    """The parts of a weight as panels are packed of them: as they lie in the file, if they need no conversion."""
    parts = weight.tensors
    if parts is not None and all(part.stride(1) == 1 for part in parts):
        return parts
    return (weight.copied(),)


def or_empty(values: Tensor | None) -> Tensor:
    """`values`, or an empty tensor for None, as operators take it."""
    return torch.empty(0, dtype=torch.bfloat16) if values is None else values.contiguous()
