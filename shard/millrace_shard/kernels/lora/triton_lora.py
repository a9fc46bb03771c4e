"""The adapters of the rows of a linear: shrink, `x @ A.T`, then expand, whose results are added to the linear's.

A program computes a block of up to 16 rows of one adapter, see `AdapterRows.blocks`, with tiles of one size, so that
the bits of a row depend only on the row and its adapter. Rows in no block are neither read nor written.

The inputs are split into parts, which follow from the shape of the layer. With few blocks each part has a program of
its own; with many blocks one program computes and adds all parts. Both add the parts in order. The result is multiplied
with the factors and rounded to the dtype of the model.

Programs read slots, addresses and numbers of slices on the device, so that a captured launch holds for other rows and
other adapters. A grid has programs for as many slices as any adapter has; programs past the end of a smaller adapter
end at once.

Products are `weight @ x.T`, as in `triton_linear`. No tiling has been measured on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from millrace_shard.kernels.lora.adapted_linear import Product
from millrace_shard.kernels.lora.adapter_table import BLOCK_ROWS, DEPTH, LoraSite

INPUTS = 64
"""Inputs per iteration of a shrink."""
OUTPUTS = 64
"""Outputs per program of an expand."""
LEAST_PART, MOST_PARTS = 512, 8
"""Inputs of the shortest part, and the most parts of a layer."""
MANY_BLOCKS = 32
"""From this number of blocks on they occupy a GPU, and each program adds all parts by itself."""

_VARYING = ["grid_slices", "num_modules", "first_module"]
"""Numbers that differ by layer and by adapter, for whose values nothing is compiled."""
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)
_SLICE = tl.constexpr(16)
_ROWS = tl.constexpr(BLOCK_ROWS)
_BLOCK = tl.constexpr(BLOCK_ROWS + 1)
_ENTRY = tl.constexpr(5)


@triton.jit
def _dot(left, right, total):
    """`total` + `left` [m, k] @ `right` [k, n]."""
    if _INTERPRETED:
        # numpy's products of matrices take their sums in an order that follows from the shapes.
        pairs = left.to(tl.float32)[:, :, None] * right.to(tl.float32)[None, :, :]
        total += tl.sum(pairs, 1)
    else:
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit
def _weight(entry, like):
    """The weight whose address is at `entry`, of the dtype of `like`."""
    weight = tl.load(entry).to(tl.pointer_type(like.dtype.element_ty))
    return tl.multiple_of(weight, 16)


@triton.jit(do_not_specialize=_VARYING)
def _shrink(
    partials,
    x,
    blocks,
    table,
    row_stride,
    num_inputs,
    padded_inputs,
    part,
    grid_slices,
    num_modules,
    first_module,
    parts: tl.constexpr,
    inputs: tl.constexpr,
):
    """Add `parts` parts per program to `partials`; grid (blocks, modules * grid_slices, any).

    `partials` [grid[2], modules * grid_slices, blocks, 16 ranks, 16 rows] float32.
    """
    block = blocks + tl.program_id(0) * _BLOCK
    module = tl.program_id(1) // grid_slices
    own = tl.program_id(1) % grid_slices
    slot = tl.load(block).to(tl.int64)
    entry = table + (slot * num_modules + first_module + module) * _ENTRY
    if own < tl.load(entry + 4):
        rank = tl.arange(0, _SLICE)
        row = tl.load(block + 1 + tl.arange(0, _ROWS))
        at = tl.arange(0, inputs)
        a = _weight(entry, x) + own.to(tl.int64) * _SLICE * padded_inputs
        a_rows = a + (rank * padded_inputs)[:, None]
        x_rows = x + (row.to(tl.int64) * row_stride)[:, None]
        total = tl.zeros([_SLICE, _ROWS], tl.float32)
        for index in range(parts):
            begin = (tl.program_id(2) * parts + index) * part
            product = tl.zeros([_SLICE, _ROWS], tl.float32)
            for start in range(begin, tl.minimum(begin + part, num_inputs), inputs):
                column = (start + at)[None, :]
                known = column < num_inputs
                left = tl.load(a_rows + column, mask=known, other=0.0)
                right = tl.load(x_rows + column, mask=known & (row >= 0)[:, None], other=0.0)
                product = _dot(left, tl.trans(right), product)
            total += product
        where = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        where = (where * tl.num_programs(0) + tl.program_id(0)) * _SLICE
        places = (rank * _ROWS)[:, None] + tl.arange(0, _ROWS)[None, :]
        tl.store(partials + where * _ROWS + places, total)


@triton.jit
def _delta(
    x,
    partials,
    entry,
    output,
    num_outputs,
    module,
    grid_slices,
    modules: tl.constexpr,
    parts: tl.constexpr,
):
    """The delta of the module at `entry` for `output`s [n] of this program's block: [n, 16 rows] float32."""
    rank = tl.arange(0, _SLICE)
    wanted = output < num_outputs
    b = _weight(entry + 1, x)
    factors = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
    bias = tl.load(entry + 3)
    places = (rank * _ROWS)[:, None] + tl.arange(0, _ROWS)[None, :]
    total = tl.zeros([output.shape[0], _ROWS], tl.float32)
    for each in range(tl.load(entry + 4).to(tl.int32)):
        state = tl.zeros([_SLICE, _ROWS], tl.float32)
        for index in tl.static_range(parts):
            where = (index * modules + module).to(tl.int64) * grid_slices + each
            where = (where * tl.num_programs(0) + tl.program_id(0)) * _SLICE
            state += tl.load(partials + where * _ROWS + places)
        state *= tl.load(factors + each * _SLICE + rank)[:, None]
        first = (each * tl.cdiv(num_outputs, _SLICE) * _SLICE).to(tl.int64)
        at = (first + output)[:, None] * _SLICE + rank[None, :]
        left = tl.load(b + at, mask=wanted[:, None], other=0.0)
        total = _dot(left, state.to(x.dtype.element_ty), total)
    if bias != 0:
        values = bias.to(tl.pointer_type(tl.float32))
        total += tl.load(values + output, mask=wanted, other=0.0)[:, None]
    return total


@triton.jit(do_not_specialize=_VARYING)
def _expand(
    out,
    x,
    partials,
    blocks,
    table,
    spans,
    row_stride,
    grid_slices,
    num_modules,
    first_module,
    modules: tl.constexpr,
    parts: tl.constexpr,
    outputs: tl.constexpr,
):
    """Add the deltas of `partials` in `parts` parts, see `_shrink`, to the rows of `out`.

    The grid is (blocks, tiles of the outputs of the widest module, modules). `spans` [modules, 2] int32 holds the first
    output of each module in `out`, and its number of outputs. The weights have the dtype of `x`.
    """
    block = blocks + tl.program_id(0) * _BLOCK
    module = tl.program_id(2)
    slot = tl.load(block).to(tl.int64)
    entry = table + (slot * num_modules + first_module + module) * _ENTRY
    num_outputs = tl.load(spans + 2 * module + 1)
    begin = tl.program_id(1) * outputs
    if (tl.load(entry + 4) > 0) & (begin < num_outputs):
        row = tl.load(block + 1 + tl.arange(0, _ROWS))
        output = begin + tl.arange(0, outputs)
        delta = _delta(x, partials, entry, output, num_outputs, module, grid_slices, modules, parts)
        column = tl.load(spans + 2 * module) + output
        at = out + (row.to(tl.int64) * row_stride)[None, :] + column[:, None]
        mask = (output < num_outputs)[:, None] & (row >= 0)[None, :]
        base = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, (base + delta).to(out.dtype.element_ty), mask=mask)


def part_length(num_inputs: int) -> int:
    """Inputs per part; the sums of parts are added in order, so the split decides the bits."""
    length = max(LEAST_PART, -(-num_inputs // MOST_PARTS))
    return -(-length // INPUTS) * INPUTS


class TritonAdaptedLinear:
    """A linear to whose results the deltas of adapters are added, on any device that Triton compiles for."""

    def __init__(self, linear: Product, site: LoraSite) -> None:
        """Adapters for `site` are packed in slices from here on."""
        self._linear = linear
        self._site = site
        site.packing = "slices"
        spans = [(part.first_output, part.num_outputs) for part in site.parts]
        self._spans = torch.tensor(spans, dtype=torch.int32, device=site.table.device)
        self._num_tiles = max(1, *(triton.cdiv(count, OUTPUTS) for _, count in spans))
        self._num_inputs = site.parts[0].num_inputs
        self._part = part_length(self._num_inputs)
        self._num_parts = max(1, triton.cdiv(self._num_inputs, self._part))

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        y = self._linear(x)
        rows = self._site.rows
        if rows is not None:
            self._add(y, x if x.stride(1) == 1 else x.contiguous(), rows.blocks)
        return y

    def _add(self, y: Tensor, x: Tensor, blocks: Tensor) -> None:
        """Add to the rows of `blocks` of `y` in place."""
        site, num_modules = self._site, len(self._site.parts)
        table = site.table
        num_programs = 1 if len(blocks) >= MANY_BLOCKS else self._num_parts
        slices = table.grid_slices
        shape = (num_programs, num_modules * slices, len(blocks), BLOCK_ROWS, BLOCK_ROWS)
        partials = x.new_empty(shape, dtype=torch.float32)
        _shrink[(len(blocks), num_modules * slices, num_programs)](
            partials,
            x,
            blocks,
            table.lora_table,
            x.stride(0),
            self._num_inputs,
            triton.cdiv(self._num_inputs, DEPTH) * DEPTH,
            self._part,
            slices,
            len(table.parts),
            site.first,
            parts=self._num_parts // num_programs,
            inputs=INPUTS,
            num_warps=4,
            num_stages=4,
        )
        _expand[(len(blocks), self._num_tiles, num_modules)](
            y,
            x,
            partials,
            blocks,
            table.lora_table,
            self._spans,
            y.stride(0),
            slices,
            len(table.parts),
            site.first,
            modules=num_modules,
            parts=num_programs,
            outputs=OUTPUTS,
            num_warps=4,
            num_stages=2,
        )
