"""Tilings of deterministic linears; the split of the inputs follows from the shape of a layer, not from the rows.

No tiling has been measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PART_STEP = 64
"""Parts are multiples of this number of inputs, which every tile's iteration divides."""
LEAST_PART = 512
"""Inputs of the shortest part: shorter ones would cost more to add than to multiply."""
NUM_PARTS = ((16384, 1), (8192, 2), (3072, 4), (0, 8))
"""The most parts of the inputs for layers of at least a number of outputs: narrow layers need them to occupy a GPU."""
MANY_ROWS = 256
"""From this number of rows on, tiles of rows and outputs occupy a GPU, and each program adds all parts by itself."""

EXPERT_ROWS = 512
"""Rows of an expert, on average, from which fast mode expands its codes once: from about 300 on it takes less time."""

EXPERT_BYTES = 512 << 20
"""Expanded weights of experts at a time, which the largest prompt of the warm-up counts."""


@dataclass(frozen=True, slots=True)
class RowTiling:
    """The tile of a program, and how it is compiled; it does not affect the bits of a row."""

    rows: int
    outputs: int
    inputs: int
    """Per iteration."""
    num_warps: int
    num_stages: int


FLOAT32 = RowTiling(rows=32, outputs=32, inputs=32, num_warps=4, num_stages=2)
TENSOR_CORES = (
    RowTiling(rows=16, outputs=64, inputs=64, num_warps=4, num_stages=6),
    RowTiling(rows=64, outputs=64, inputs=64, num_warps=4, num_stages=4),
    RowTiling(rows=128, outputs=128, inputs=64, num_warps=8, num_stages=3),
)
"""For few rows, for more than 16, and for many. All use one instruction of the tensor cores, which takes 64 outputs."""

PROMPTS = RowTiling(rows=256, outputs=128, inputs=64, num_warps=8, num_stages=3)
"""For prompts, where one program would add one part: two sums of so large a tile do not fit into registers."""
PROMPT_ROWS = 1024
"""With fewer rows, its tiles occupy a GPU less well than smaller ones, which read a quarter more from the caches."""


def part_length(num_outputs: int, num_inputs: int) -> int:
    """Inputs per part; the sums of parts are added in order, so the split decides the bits."""
    most = next(count for least, count in NUM_PARTS if num_outputs >= least)
    length = max(min(num_inputs, LEAST_PART), -(-num_inputs // most))
    return -(-length // PART_STEP) * PART_STEP


def row_tiling(dtype: torch.dtype, num_rows: int, *, has_one_sum: bool = False) -> RowTiling:
    """The tile for `num_rows`; `has_one_sum`: a program has the sum of one part of the inputs, and no other."""
    if dtype == torch.float32:
        return FLOAT32
    few, some, many = TENSOR_CORES
    if num_rows >= MANY_ROWS:
        return PROMPTS if has_one_sum and num_rows >= PROMPT_ROWS else many
    return few if num_rows <= few.rows else some
