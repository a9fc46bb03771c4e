"""The weight of a linear, quantised or not, packed as the operators over tiles take it.

Exact products multiply bfloat16 activations with the values of the codes; tables whose values bfloat16 does not
hold (nf4, fp4) are sums of two parts, with a relative error of at most 2^-17. Products of integers quantise activations
to int8, with a scale for every 32 inputs of a row. The choice is made once for each weight, so a row's bits do not
depend on the number of rows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from millrace_shard.kernels.layer_weights import LinearWeights
from millrace_shard.kernels.quantized import (
    PlainQuantizedLinear,
    QuantizedTensor,
    in_common_form,
    with_groups_of_multiples,
)
from millrace_shard.kernels.stored_weight import StoredWeight

EXACT_STEP, INTEGER_STEP = 32, 64
"""Inputs of a step; groups are multiples of it, or half a step, or all inputs."""
MULTIPLIERS = (1, 2)
"""Factors that make integers of the tables in use."""
TOLERANCE = 2.0**-15
"""Of float32 sums, relative to the sum of absolute products."""
CHECKED_OUTPUTS = 48
CHECKED_ROWS = (1, 3, 40)

logger = logging.getLogger(__name__)


def packed_codes(
    parts: Sequence[QuantizedTensor],
    *,
    integer: bool,
    gated: bool = False,
    warn: Callable[[str], object] = logger.warning,
) -> Tensor | None:
    """The concatenation of `parts` [n, in], packed; None if it has to be dequantised, and `warn` gets the reason.

    `integer` requests products of integers, which are possible only for integer values. With `gated`, panels hold
    gates and ups, as `pack_panels` lays them out.
    """
    common = in_common_form(parts)
    if common is None:
        warn("dequantized: the parts of a fused linear have no common form")
        return None
    forms = [_for_integers(common)] if integer else []
    forms.append(with_groups_of_multiples(common, EXACT_STEP))
    for is_integer, form in zip((integer, False), forms, strict=False):
        if form is None:
            continue
        if not _agrees(_Form.of(form[0], integer=is_integer)):
            return None
        return _pack(form, integer=is_integer, gated=gated)
    size = common[0].group_size
    warn(f"dequantized: groups of {size} inputs; kernels have multiples of 16")
    return None


def has_integer_products(weight: QuantizedTensor) -> bool:
    """Whether products of integers are possible with this weight."""
    common = in_common_form([weight])
    return common is not None and _for_integers(common) is not None


def _for_integers(parts: list[QuantizedTensor]) -> list[QuantizedTensor] | None:
    """The parts with integer values and groups for integer products; None where there are none."""
    grouped = with_groups_of_multiples(parts, INTEGER_STEP)
    values = parts[0].values
    if grouped is None or not bool(values.isfinite().all()):
        return None
    if len(values) == 256:
        first = float(values[0])
        is_shifted = torch.equal(values, torch.arange(256.0) + first)
        return grouped if is_shifted and first.is_integer() and -255 <= first <= 0 else None
    for factor in MULTIPLIERS:
        scaled = values * factor
        if bool(((scaled == scaled.round()) & (scaled.abs() < 128)).all()):
            return [
                replace(part, values=scaled, scales=part.scales / factor) if factor != 1 else part
                for part in grouped
            ]
    return None


def _pack(parts: list[QuantizedTensor], *, integer: bool, gated: bool) -> Tensor:
    first = parts[0]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    order = torch.empty(0, dtype=torch.int64) if first.input_order is None else first.input_order
    packed: Tensor = torch.ops.millrace.pack_codes(
        # Codes that were made of a transposed weight are transposed.
        [part.codes if part.codes.stride(1) == 1 else part.codes.contiguous() for part in parts],
        first.values,
        [part.scales.contiguous() for part in parts],
        [each.contiguous() for each in offsets],
        first.group_size,
        order,
        gated,
        integer,
    )
    return packed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """The properties of a weight that the operator's choice of code depends on."""

    inputs: int
    group_size: int
    values: tuple[float, ...]
    has_offsets: bool
    has_order: bool
    integer: bool

    @classmethod
    def of(cls, part: QuantizedTensor, *, integer: bool) -> _Form:
        return cls(
            inputs=part.shape[1],
            group_size=part.group_size,
            values=tuple(part.values.nan_to_num(0.0).tolist()),
            has_offsets=part.offsets is not None,
            has_order=part.input_order is not None,
            integer=integer,
        )

    def random(self, generator: torch.Generator) -> QuantizedTensor:
        """A small weight of this form."""
        values, inputs = torch.tensor(self.values), self.inputs
        codes = torch.randint(len(values), (CHECKED_OUTPUTS, inputs), generator=generator)
        shape = CHECKED_OUTPUTS, -(-inputs // self.group_size)
        scales, offsets = (torch.rand(shape, generator=generator) for _ in range(2))
        order = torch.randperm(inputs, generator=generator)
        return QuantizedTensor(
            codes=codes.to(torch.uint8),
            values=values,
            scales=scales / values.abs().max(),
            offsets=offsets - 0.5 if self.has_offsets else None,
            group_size=self.group_size,
            input_order=order if self.has_order else None,
        )


@functools.cache
def _agrees(form: _Form) -> bool:
    """Compare the operator with the plain twin on a small weight of this form, and rows with themselves."""
    generator = torch.Generator().manual_seed(0)
    weight = form.random(generator)
    x = torch.randn(max(CHECKED_ROWS), form.inputs, generator=generator).bfloat16()
    expected = PlainQuantizedLinear(weight, None, integer=form.integer)(x)
    size = x.double().abs() @ weight.dequantized().double().abs().T
    if weight.offsets is not None:
        size += x.double().abs().sum(1, keepdim=True)
    packed = _pack([weight], integer=form.integer, gated=False)
    whole = None
    for rows in sorted(CHECKED_ROWS, reverse=True):
        y = torch.empty(rows, CHECKED_OUTPUTS)
        torch.ops.millrace.panel_linear(y, x[:rows], packed, torch.empty(0, dtype=torch.bfloat16))
        whole = y if whole is None else whole
        is_close = bool(((y - expected[:rows]).abs() <= TOLERANCE * size[:rows]).all())
        if not is_close or not torch.equal(y, whole[:rows]):
            logger.warning(
                "dequantized: on this CPU the operator is wrong for groups of %d of %d inputs",
                form.group_size,
                form.inputs,
            )
            return False
    return True


def packed(
    weights: LinearWeights,
    *,
    integer: bool,
    gated: bool = False,
    warn: Callable[[str], object] = logger.warning,
) -> tuple[Tensor, Tensor]:
    """Packed weight and bias: codes stay codes, and are multiplied as in `packed_codes`.

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
        warn("dequantized: some parts of a fused linear are not quantized")
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
