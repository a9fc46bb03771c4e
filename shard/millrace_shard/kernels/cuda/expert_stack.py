"""One linear of all experts of a layer: weights that stay packed where all are codes of one format, and products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
import triton
from torch import Tensor

from millrace_shard.kernels.cuda.linear_tilings import EXPERT_BYTES, EXPERT_ROWS, row_tiling
from millrace_shard.kernels.cuda.packed_codes import SCALE_DTYPES, PackedCodes, pack, unpacked
from millrace_shard.kernels.cuda.quantized_linear import are_one_matrix, expand, sums_of_steps
from millrace_shard.kernels.cuda.triton_experts import multiply_experts
from millrace_shard.kernels.cuda.triton_quantized import multiply_expert_codes
from millrace_shard.kernels.layer_weights import LinearWeights
from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_shard.kernels.stored_weight import StoredWeight

EXPANDED = "experts are expanded to the model's type on CUDA: their codes have several formats, or another order"

Groups = tuple[Tensor, Tensor]
"""Pairs of a token and an expert in the order of the experts, [pairs] int32, and where each begins, [E + 1] int32."""


class ExpertStack:
    """The linears [out, in] of E experts, which are added one by one."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._whole: Tensor | None = None
        """[E, out, in] in the model's dtype, unless the weights are packed."""
        self._packed: PackedCodes | None = None
        """With codes [E, steps, out, bytes of a step], scales and offsets [E, groups, out]."""
        self._biases: Tensor | None = None
        """[E, out]."""

    @property
    def num_outputs(self) -> int:
        if self._packed is not None:
            return self._packed.num_outputs
        assert self._whole is not None, "there are experts"
        return self._whole.shape[1]

    @property
    def num_bytes(self) -> int:
        """Memory of the weights and biases."""
        packed = self._packed
        parts = [self._whole, self._biases]
        if packed is not None:
            parts += [packed.codes, packed.scales, packed.offsets]
        return sum(each.nbytes for each in parts if each is not None)

    @property
    def is_plain(self) -> bool:
        """Whether the weights are in the model's dtype, without biases."""
        return self._whole is not None and self._biases is None

    def add(self, index: int, linear: LinearWeights) -> None:
        """Copy the weights of expert `index`; the first one decides whether they stay packed."""
        weight = linear.weight
        packed = _packed(weight)
        if self._packed is not None and (packed is None or not _same(self._packed, packed)):
            self._expand(index, weight)
        if index == 0 and packed is not None:
            self._packed = _empty(packed, self._num_experts)
        if self._packed is not None and packed is not None:
            for stack, each in _pairs(self._packed, packed):
                stack[index] = each
        else:
            self._put(index, weight.copied())
        self._add_bias(index, linear.bias)

    def finish(self) -> None:
        """Store the scales of packed experts in the narrowest dtype that is exact for all."""
        packed = self._packed
        if packed is not None:
            self._packed = replace(
                packed,
                scales=_narrowed(packed.scales),
                offsets=None if packed.offsets is None else _narrowed(packed.offsets),
            )

    def multiply(
        self,
        out: Tensor,
        x: Tensor,
        groups: Groups,
        pairs_per_row: int,
        *,
        expands: bool = False,
    ) -> None:
        """Overwrite row p of `out` [pairs, out] with the product of row `p // pairs_per_row` of `x` and its expert.

        If it `expands`, products with many rows of each expert are over weights that are expanded before, rounded to
        the dtype of `x`, some experts at a time.
        """
        tiling = row_tiling(x.dtype, max(1, len(out) // self._num_experts))
        num_outputs = out.shape[1]
        tiles = most_tiles(len(out), self._num_experts, tiling.rows)
        grid = tiles, triton.cdiv(num_outputs, tiling.outputs)
        constants = {
            "pairs_per_row": pairs_per_row,
            "has_bias": self._biases is not None,
            "rows": tiling.rows,
            "outputs": tiling.outputs,
            "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
        }
        order, starts = groups
        is_many = len(out) >= EXPERT_ROWS * self._num_experts
        if self._packed is not None and not (expands and is_many):
            self._multiply_codes(grid, out, x, self._packed, groups, constants)
            return
        for first, weight in self._matrices(x.dtype):
            multiply_experts[grid](
                out,
                x,
                weight,
                weight if self._biases is None else self._biases[first:],
                order,
                starts[first:],
                len(weight),
                num_outputs,
                weight.shape[2],
                inputs=tiling.inputs,
                **constants,
            )

    def _matrices(self, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """The weights [n, out, in] of some experts in turn, in the same memory, and the number of the first one."""
        packed = self._packed
        if packed is None:
            assert self._whole is not None, "there are experts"
            yield 0, self._whole
            return
        shape = packed.num_outputs, packed.num_inputs
        most = max(1, EXPERT_BYTES // (shape[0] * shape[1] * dtype.itemsize))
        size = min(most, self._num_experts)
        room = packed.codes.new_empty(size, *shape, dtype=dtype)
        for first in range(0, self._num_experts, size):
            chosen = slice(first, first + size)
            part = replace(
                packed,
                codes=packed.codes[chosen],
                scales=packed.scales[chosen],
                offsets=None if packed.offsets is None else packed.offsets[chosen],
            )
            matrices = room[: len(part.codes)]
            expand(matrices, part, 0)
            yield first, matrices

    def multiply_sorted(self, x: Tensor, starts: Tensor) -> Tensor:
        """Torch's products of `x` [pairs, in], in the order of the experts, which `is_plain` allows: [pairs, out]."""
        assert self._whole is not None, "the weights are plain"
        return F.grouped_mm(x, self._whole.transpose(1, 2), offs=starts[1:])

    def _multiply_codes(
        self,
        grid: tuple[int, int],
        out: Tensor,
        x: Tensor,
        weight: PackedCodes,
        groups: Groups,
        constants: dict[str, int],
    ) -> None:
        sums = None if weight.offsets is None else sums_of_steps(weight, x)
        multiply_expert_codes[grid](
            out,
            x,
            *weight.operands(sums),
            weight.values if self._biases is None else self._biases,
            *groups,
            self._num_experts,
            len(x),
            out.shape[1],
            weight.num_inputs,
            weight.num_steps,
            weight.scales.shape[1],
            weight.group_size,
            form=weight.form,
            **constants,
        )

    def _expand(self, index: int, weight: StoredWeight) -> None:
        """Take the first `index` experts out of their codes."""
        packed, self._packed = self._packed, None
        assert packed is not None
        weight.warn(EXPANDED)
        for each in range(index):
            one = replace(
                packed,
                codes=packed.codes[each],
                scales=packed.scales[each],
                offsets=None if packed.offsets is None else packed.offsets[each],
            )
            self._put(each, unpacked(one).to(weight.dtype))

    def _put(self, index: int, matrix: Tensor) -> None:
        if self._whole is None:
            self._whole = matrix.new_empty(self._num_experts, *matrix.shape)
        self._whole[index] = matrix

    def _add_bias(self, index: int, bias: Tensor | None) -> None:
        if bias is not None:
            if self._biases is None:
                self._biases = bias.new_zeros(self._num_experts, len(bias))
            self._biases[index] = bias


def most_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """The most tiles of `rows` pairs of one expert, whichever experts are chosen."""
    return min(num_pairs, num_pairs // rows + num_experts)


def _packed(weight: StoredWeight) -> PackedCodes | None:
    """The codes of one expert; None if they are not one matrix whose inputs are in order."""
    parts = [part for part in weight.parts if isinstance(part, QuantizedTensor)]
    if len(parts) < len(weight.parts) or not are_one_matrix(parts):
        return None
    if parts[0].input_order is not None:
        weight.warn(EXPANDED)
        return None
    return pack(parts, weight.dtype, weight.device, weight.copy)


def _same(stack: PackedCodes, one: PackedCodes) -> bool:
    """Whether one expert has the format of those before it."""
    same_facts = _facts(stack) == _facts(one)
    return same_facts and torch.equal(stack.values.nan_to_num(0), one.values.nan_to_num(0))


def _facts(codes: PackedCodes) -> tuple[object, ...]:
    """All but the numbers."""
    sizes = codes.bits, codes.num_inputs, codes.num_outputs, codes.step, codes.group_size
    return (*sizes, codes.kind, codes.least, codes.offsets is None, len(codes.values))


def _empty(first: PackedCodes, num_experts: int) -> PackedCodes:
    """Room for the codes of as many experts as the `first` one; scales are float32 until `finish`."""

    def room(each: Tensor, dtype: torch.dtype) -> Tensor:
        return each.new_empty(num_experts, *each.shape, dtype=dtype)

    offsets = None if first.offsets is None else room(first.offsets, torch.float32)
    return replace(
        first,
        codes=room(first.codes, torch.uint8),
        scales=room(first.scales, torch.float32),
        offsets=offsets,
    )


def _pairs(stack: PackedCodes, one: PackedCodes) -> list[tuple[Tensor, Tensor]]:
    pairs = [(stack.codes, one.codes), (stack.scales, one.scales)]
    if stack.offsets is not None and one.offsets is not None:
        pairs.append((stack.offsets, one.offsets))
    return pairs


def _narrowed(scales: Tensor) -> Tensor:
    for dtype in SCALE_DTYPES:
        narrow = scales.to(dtype)
        if torch.equal(narrow.float(), scales):
            return narrow
    return scales
