"""The weight of a linear, quantised or not, packed as the operators over tiles take it.

Exact products multiply bfloat16 activations with the values of the codes; tables whose values bfloat16 does not
hold (nf4, fp4) are sums of two parts, with a relative error of at most 2^-17. Products of integers round activations to
integers of 8 or 16 bits, with a scale for every 32 inputs of a row. The choice is made once for each weight, so a row's
bits do not depend on the number of rows.

On AMX, weights with groups of at most 32 inputs are rounded to bfloat16: scaling the sums of such a group would take
longer than computing them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from millrace_shard.kernels.kept_results import kept_results
from millrace_shard.kernels.layer_weights import LinearWeights
from millrace_shard.kernels.quantized import (
    CodeFormat,
    PlainQuantizedLinear,
    QuantizedTensor,
    fit_groups,
    have_common_form,
    in_common_form,
    with_groups_of_multiples,
)
from millrace_shard.kernels.stored_weight import Part, StoredWeight

STEP = 32
"""Inputs of a step; groups are multiples of it, or half a step, or all inputs."""
PANEL_OUTPUTS = 32
MULTIPLIERS = (1, 2, 8)
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
    wide: bool = False,
    gated: bool = False,
    warn: Callable[[str], object] = logger.warning,
) -> Tensor | None:
    """The concatenation of `parts` [n, in], packed; None if it has to be dequantised, and `warn` gets the reason.

    `integer` requests products of integers, which are possible only for integer values; with `wide` activations have
    16 bits, not 8. With `gated`, panels hold gates and ups, as `pack_panels` lays them out.
    """
    common = in_common_form(parts)
    if common is None:
        warn("dequantized: the parts of a fused linear have no common form")
        return None
    forms = [_for_integers(common)] if integer else []
    forms.append(with_groups_of_multiples(common, STEP))
    for is_integer, form in zip((integer, False), forms, strict=False):
        if form is None:
            continue
        input_bytes = is_integer * (2 if wide else 1)
        if not _agrees(CodeFormat.of(form[0]), form[0].shape[1], input_bytes):
            return None
        return _pack(form, input_bytes, gated=gated)
    size = common[0].group_size
    warn(f"dequantized: groups of {size} inputs; kernels have multiples of 16")
    return None


def has_integer_products(weight: QuantizedTensor) -> bool:
    """Whether products of integers are possible with this weight."""
    common = in_common_form([weight])
    return common is not None and _for_integers(common) is not None


def _for_integers(parts: list[QuantizedTensor]) -> list[QuantizedTensor] | None:
    """The parts with integer values and groups for integer products; None where there are none."""
    grouped = with_groups_of_multiples(parts, STEP)
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
            return [_multiplied(part, factor) if factor != 1 else part for part in grouped]
    return None


def _multiplied(part: QuantizedTensor, factor: int) -> QuantizedTensor:
    """The part with a table that is multiplied by `factor`, a power of two, and scales that are divided by it."""
    units = part.units and replace(part.units, scales=part.units.scales / factor)
    return replace(part, values=part.values * factor, scales=part.scales / factor, units=units)


def _pack(parts: list[QuantizedTensor], input_bytes: int, *, gated: bool) -> Tensor:
    """The concatenation of `parts`, for activations in integers of `input_bytes` bytes, or exact ones if it is 0."""
    first = parts[0]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    units = [part.units for part in parts if part.units is not None]
    if len(units) < len(parts):
        units = []
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
        input_bytes,
        [each.scales.contiguous() for each in units],
        [each.offsets.contiguous() for each in units] if offsets else [],
    )
    return packed


@functools.cache
def _agrees(form: CodeFormat, inputs: int, input_bytes: int) -> bool:
    return kept_results().passed(
        f"packed weight {form} of {inputs} inputs for {input_bytes} bytes",
        lambda: _is_like_plain(form, inputs, input_bytes),
    )


def _widens(form: CodeFormat, inputs: int) -> bool:
    """Whether weights are rounded to bfloat16."""
    if torch.ops.millrace.tile_unit() != "amx" or form.group_size is None:
        return False
    return form.group_size <= min(STEP, inputs - 1)


def widened(weight: QuantizedTensor) -> Tensor:
    """The matrix [out, in] in float64, its elements rounded to float32 and then to bfloat16, ties away from zero."""
    offsets = None if weight.offsets is None else weight.offsets.double()
    exact = replace(
        weight, values=weight.values.double(), scales=weight.scales.double(), offsets=offsets
    )
    bits = exact.dequantized().float().view(torch.int32) + 0x8000
    return (bits & -0x10000).view(torch.float32).double()


def _is_like_plain(form: CodeFormat, inputs: int, input_bytes: int) -> bool:
    """Compare the operator with the plain twin on a small weight of this form, and rows with themselves."""
    weight = form.random(CHECKED_OUTPUTS, inputs, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(CHECKED_ROWS), inputs, generator=generator).bfloat16()
    if input_bytes == 0 and _widens(form, inputs):
        expected = x.double() @ widened(weight).T
    else:
        # Rounding to 16 bits is within the tolerance.
        expected = PlainQuantizedLinear(weight, None, integer=input_bytes == 1)(x)
    values = replace(weight, offsets=None).dequantized().double()
    products = values.abs() + (weight.dequantized().double() - values).abs()
    size = x.double().abs() @ products.T
    packed = _pack([weight], input_bytes, gated=False)
    whole = None
    for rows in sorted(CHECKED_ROWS, reverse=True):
        y = torch.empty(rows, CHECKED_OUTPUTS)
        torch.ops.millrace.panel_linear(y, x[:rows], packed, torch.empty(0, dtype=torch.bfloat16))
        whole = y if whole is None else whole
        is_close = bool(((y - expected[:rows]).abs() <= TOLERANCE * size[:rows]).all())
        if not is_close or not torch.equal(y, whole[:rows]):
            logger.warning(
                "dequantized: on this CPU the operator is wrong for groups of %d of %d inputs",
                weight.group_size,
                inputs,
            )
            return False
    return True


def packed(
    weights: LinearWeights, *, integer: bool, wide: bool = False, gated: bool = False
) -> tuple[Tensor, Tensor]:
    """Packed weight and bias: codes stay codes, and are multiplied as in `packed_codes`, also in several forms.

    The weight is packed directly from the mapped file if it needs no conversion, and not read at all if an earlier
    start has kept it.
    """
    stored, bias = weights.weight, or_empty(weights.bias)
    route = _route(integer=integer, wide=wide, gated=gated)
    kept = stored.packed(route)
    if kept is not None:
        return kept, bias
    codes = [part for part in stored.parts if isinstance(part, QuantizedTensor)]
    if len(codes) == len(stored.parts):
        coded = _joined(codes, integer=integer, wide=wide, gated=gated, warn=stored.warn)
        if coded is not None:
            stored.keep(route, coded)
            return coded, bias
    elif codes:
        stored.warn("dequantized: some parts of a fused linear are not quantized")
    return torch.ops.millrace.pack_panels(_unpacked_parts(stored), gated), bias


def is_one_matrix(
    weights: LinearWeights, *, integer: bool, wide: bool = False, gated: bool = False
) -> bool:
    """Whether `packed` packs all parts as they are; else `runs` are packed each for itself."""
    stored = weights.weight
    if stored.has_packed(_route(integer=integer, wide=wide, gated=gated)):
        return True
    return len(runs(stored.parts)) == 1 or (not gated and len(_forms(stored.parts)) > 0)


def _forms(parts: Sequence[Part]) -> list[list[QuantizedTensor]]:
    """`parts` in runs of neighbours of one format, if kernels multiply all of them and all but the last fill panels."""
    found: list[list[QuantizedTensor]] = []
    for part in parts:
        if not isinstance(part, QuantizedTensor) or not fit_groups([part], STEP):
            return []
        if found and _format(found[-1][0]) == _format(part):
            found[-1].append(part)
        elif part.input_order is None:
            found.append([part])
        else:
            return []
    fills = (sum(part.shape[0] for part in run) % PANEL_OUTPUTS == 0 for run in found[:-1])
    return found if all(fills) else []


def _format(part: QuantizedTensor) -> tuple[object, ...]:
    has_offsets, has_units = part.offsets is not None, part.units is not None
    return tuple(part.values.tolist()), part.group_size, has_offsets, has_units


def _joined(
    codes: Sequence[QuantizedTensor],
    *,
    integer: bool,
    wide: bool,
    gated: bool,
    warn: Callable[[str], object],
) -> Tensor | None:
    """The weight with each of `_forms` as it is: a common form has more bits. Without forms, in a common form."""
    forms = [] if gated else _forms(codes)
    if len(forms) < 2:
        return packed_codes(codes, integer=integer, wide=wide, gated=gated, warn=warn)
    packs = [packed_codes(each, integer=integer, wide=wide, warn=warn) for each in forms]
    whole = [pack for pack in packs if pack is not None]
    if len(whole) < len(packs):
        return None
    joined: Tensor = torch.ops.millrace.join_codes(whole)
    return joined


def runs(parts: Sequence[Part]) -> list[list[Part]]:
    """`parts` in runs of neighbours that one packed weight holds as they are."""
    found: list[list[Part]] = []
    for part in parts:
        if found and _are_one([*found[-1], part]):
            found[-1].append(part)
        else:
            found.append([part])
    return found


def _are_one(parts: Sequence[Part]) -> bool:
    codes = [part for part in parts if isinstance(part, QuantizedTensor)]
    if len(codes) < len(parts):
        return not codes
    fit = [fit_groups([part], STEP) for part in codes]
    return have_common_form(codes) and fit_groups(codes, STEP) == any(fit)


def _route(*, integer: bool, wide: bool, gated: bool) -> str:
    products = "exact" if not integer else "int16" if wide else "int8"
    return f"{products}{' gated' if gated else ''}"


def _unpacked_parts(weight: StoredWeight) -> Sequence[Tensor]:
    """The parts of a weight as panels are packed of them: as they lie in the file, if they need no conversion."""
    parts = weight.tensors
    if parts is not None and all(part.stride(1) == 1 for part in parts):
        return parts
    return (weight.copied(),)


def or_empty(values: Tensor | None) -> Tensor:
    """`values`, or an empty tensor for None, as operators take it."""
    return torch.empty(0, dtype=torch.bfloat16) if values is None else values.contiguous()
