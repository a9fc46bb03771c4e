"""Linears over quantised weights, or over parts of which some are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import triton
from torch import Tensor

from millrace_shard.kernels.base import Linear
from millrace_shard.kernels.cuda.linear_tilings import MANY_ROWS, part_length, row_tiling
from millrace_shard.kernels.cuda.packed_codes import PackedCodes, can_join, pack
from millrace_shard.kernels.cuda.scaled_products import ScaledProducts
from millrace_shard.kernels.cuda.triton_linear import add_parts
from millrace_shard.kernels.cuda.triton_quantized import (
    TABLE,
    _multiply_codes,
    _sum_steps,
    expand_codes,
)
from millrace_shard.kernels.layer_blocks import SideBySide
from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_shard.kernels.stored_weight import Part, StoredWeight

SUM_STEPS = 8
"""Steps whose inputs a program adds."""

EXPANDED_ROWS = MANY_ROWS
"""Rows from which fast mode expands weights first: with fewer, that takes longer than expanding them in each tile."""
MOST_EXPANDED_BYTES = 32 << 20
"""Weights that are expanded at a time: they are multiplied while they are in the second cache of the GPU."""
EXPANDED_OUTPUTS = 64
"""Outputs of a program that expands a step."""

Plain = Callable[[Tensor, Tensor | None], Linear]
"""Builds a linear from a weight and a bias of the model's dtype."""


def has_codes(weight: StoredWeight) -> bool:
    """Whether any part consists of codes."""
    return any(isinstance(part, QuantizedTensor) for part in weight.parts)


def linear_of_parts(
    weight: StoredWeight,
    bias: Tensor | None,
    plain: Plain,
    out_dtype: torch.dtype,
    *,
    expands: bool = False,
    scaled: bool = False,
) -> Linear:
    """A linear whose codes stay packed; parts without codes are copied for `plain`, which must return `out_dtype`.

    Neighbouring parts are one product if that is exact, and else several. If it `expands`, or is `scaled`, see
    QuantizedLinear.
    """
    linears: list[Linear] = []
    end = 0
    for parts in _runs(weight.parts):
        begin, end = end, end + sum(part.shape[0] for part in parts)
        own_bias = None if bias is None else bias[begin:end]
        coded = [part for part in parts if isinstance(part, QuantizedTensor)]
        if coded:
            packed = pack(coded, weight.dtype, weight.device, weight.copy)
            products = ScaledProducts.of(packed) if scaled else None
            linears.append(
                QuantizedLinear(
                    packed, own_bias, out_dtype=out_dtype, expands=expands, scaled=products
                )
            )
        else:
            linears.append(plain(replace(weight, parts=tuple(parts)).copied(), own_bias))
    return linears[0] if len(linears) == 1 else SideBySide(linears)


def _runs(parts: Sequence[Part]) -> list[list[Part]]:
    """`parts` in runs, each of which is one matrix."""
    runs: list[list[Part]] = []
    for part in parts:
        if runs and all(_are_alike(part, other) for other in runs[-1]):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def are_one_matrix(parts: Sequence[QuantizedTensor]) -> bool:
    """Whether `pack` can join `parts`."""
    return all(can_join(part, parts[0]) for part in parts[1:])


def _are_alike(part: Part, other: Part) -> bool:
    if isinstance(part, QuantizedTensor) and isinstance(other, QuantizedTensor):
        return can_join(part, other)
    return isinstance(part, Tensor) and isinstance(other, Tensor)


def sums_of_steps(weight: PackedCodes, x: Tensor) -> Tensor:
    """The sums of the inputs of each step of `x` [T, in]: [steps, T] float32."""
    sums = x.new_empty(weight.num_steps, len(x), dtype=torch.float32)
    _sum_steps[(len(x), triton.cdiv(weight.num_steps, SUM_STEPS))](
        sums,
        x,
        len(x),
        x.stride(0),
        weight.num_inputs,
        weight.num_steps,
        weight.group_size,
        group_steps=weight.group_steps,
        inputs=weight.step,
        steps=SUM_STEPS,
        num_warps=4,
    )
    return sums


def expand(out: Tensor, weight: PackedCodes, first_output: int) -> None:
    """Overwrite `out` [n, in] with the weights of n outputs from the first one on, in the order of the codes.

    `out` is [E, n, in] for as many matrices.
    """
    *stack, count, _ = out.shape
    grid = weight.num_steps, triton.cdiv(count, EXPANDED_OUTPUTS), *stack
    expand_codes[grid if stack else (*grid, 1)](
        out,
        weight.codes,
        weight.values,
        weight.scales,
        weight.scales if weight.offsets is None else weight.offsets,
        first_output,
        count,
        weight.num_outputs,
        weight.num_inputs,
        weight.scales.shape[-2],
        weight.group_size,
        form=weight.form._replace(kind=TABLE) if weight.kind >= TABLE else weight.form,
        outputs=EXPANDED_OUTPUTS,
        num_warps=4,
    )


class QuantizedLinear:
    """A linear over packed codes that adds the products of an output in the same order for any number of rows.

    If it `expands`, it does so for fewer than EXPANDED_ROWS only. More rows are multiplied by the vendor's library with
    weights in the dtype of the rows, a part of the outputs at a time, so that the memory does not grow with the layer;
    or, if there are `scaled` products, by these.
    """

    def __init__(
        self,
        weight: PackedCodes,
        bias: Tensor | None,
        *,
        out_dtype: torch.dtype,
        expands: bool = False,
        scaled: ScaledProducts | None = None,
    ) -> None:
        """Keep `weight` and `bias` [out]."""
        self._weight = weight
        self._bias = bias
        self._out_dtype = out_dtype
        self._expands = expands
        self._scaled = scaled
        length = part_length(weight.num_outputs, weight.num_steps * weight.step)
        self._part_steps = triton.cdiv(length, weight.step)
        self._num_parts = triton.cdiv(weight.num_steps, self._part_steps)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        weight = self._weight
        num_rows = len(x)
        out = x.new_empty(num_rows, weight.num_outputs, dtype=self._out_dtype)
        if num_rows == 0:
            return out
        if weight.input_order is not None:
            x = x.index_select(1, weight.input_order)
        elif x.stride(1) != 1:
            x = x.contiguous()
        if self._scaled is not None and num_rows >= EXPANDED_ROWS:
            return self._scaled(out, x, self._bias)
        if self._expands and num_rows >= EXPANDED_ROWS:
            return self._multiply_expanded(out, x)
        sums = None if weight.offsets is None else sums_of_steps(weight, x)
        if self._num_parts == 1 or num_rows >= MANY_ROWS:
            self._launch(out, x, sums, num_programs=1, bias=self._bias)
            return out
        shape = (self._num_parts, num_rows, weight.num_outputs)
        partials = x.new_empty(shape, dtype=torch.float32)
        self._launch(partials, x, sums, num_programs=self._num_parts, bias=None)
        add_parts(out, partials, self._bias)
        return out

    def _multiply_expanded(self, out: Tensor, x: Tensor) -> Tensor:
        weight = self._weight
        most = max(1, MOST_EXPANDED_BYTES // (weight.num_inputs * x.element_size()))
        size = min(weight.num_outputs, triton.cdiv(most, EXPANDED_OUTPUTS) * EXPANDED_OUTPUTS)
        room = x.new_empty(size, weight.num_inputs)
        for begin in range(0, weight.num_outputs, size):
            end = min(begin + size, weight.num_outputs)
            expanded, columns = room[: end - begin], out[:, begin:end]
            expand(expanded, weight, begin)
            if self._bias is None:
                torch.mm(x, expanded.t(), out=columns)
            else:
                torch.addmm(self._bias[begin:end], x, expanded.t(), out=columns)
        return out

    def _launch(
        self, out: Tensor, x: Tensor, sums: Tensor | None, *, num_programs: int, bias: Tensor | None
    ) -> None:
        """Multiply, with the parts shared by `num_programs` programs per tile."""
        weight = self._weight
        num_outputs = weight.num_outputs
        tiling = row_tiling(x.dtype, len(x))
        num_tiles = triton.cdiv(len(x), tiling.rows) * triton.cdiv(num_outputs, tiling.outputs)
        _multiply_codes[(num_tiles, num_programs)](
            out,
            x,
            *weight.operands(sums),
            weight.values if bias is None else bias,
            len(x),
            x.stride(0),
            num_outputs,
            weight.num_inputs,
            weight.num_steps,
            self._part_steps,
            weight.group_size,
            parts=self._num_parts // num_programs,
            form=weight.form,
            has_bias=bias is not None,
            rows=tiling.rows,
            outputs=tiling.outputs,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
