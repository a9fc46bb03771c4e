"""Products of many rows with weights in e4m3 by torch's `scaled_mm`, for formats whose inputs may be in e4m3, too.

A row becomes codes and their scale by itself, so that no other row has an effect on it. Scales are of whole rows, or of
128 inputs where weights have scales for blocks of 128 outputs and inputs, which only sm_90 multiplies. Sums are
float32, without the shorter ones of `use_fast_accum`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
import triton
from torch import Tensor

from millrace_shard.kernels.cuda.packed_codes import PackedCodes
from millrace_shard.kernels.cuda.triton_codes import E4M3, E4M3_BY_DEVICE, code_rows, converts_e4m3
from millrace_shard.kernels.quantized import CodeFormat

WIDTHS = 16
"""Inputs and outputs are multiples of it."""
BLOCK = 128
"""Outputs, and inputs, of a block of weights with a scale."""
BLOCKS_ON = (9, 0)
"""The compute capability whose library multiplies such blocks."""
ROWS = 4
"""Rows of products with blocks are multiples of it, and so are the scales of an output's blocks."""
MOST_BYTES = 256 << 20
"""Codes that are put into the order of the library at a time."""
COLUMNS = 1024
"""Inputs of a row that a program reads at a time."""


@dataclass(frozen=True, slots=True)
class ScaledProducts:
    """Products of rows with one matrix; see `of`."""

    weight: PackedCodes
    scales: Tensor
    """float32: [1, out], or for blocks [in / BLOCK, out / BLOCK], of which the first axis is the dense one."""
    in_blocks: bool

    @classmethod
    def of(cls, weight: PackedCodes) -> ScaledProducts | None:
        """The products with `weight`; None if its format is another one, or the library lacks its shape or scales."""
        is_e4m3 = weight.kind in (E4M3, E4M3_BY_DEVICE)
        if not (weight.e4m3_inputs and is_e4m3 and weight.form.whole_steps):
            return None
        if weight.offsets is not None or weight.num_inputs % WIDTHS or weight.num_outputs % WIDTHS:
            return None
        scales = weight.scales.float()
        if weight.group_steps == 0:
            return cls(weight, scales, in_blocks=False)
        blocks = _scales_of_blocks(weight, scales)
        return None if blocks is None else cls(weight, blocks, in_blocks=True)

    def __call__(self, out: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """Products of `x` [T, in] in bfloat16, with inputs in the order of the codes: [T, out], in `out` or not."""
        weight, num_rows = self.weight, len(x)
        codes, scales = coded_rows(x, BLOCK if self.in_blocks else weight.num_inputs)
        most = max(1, MOST_BYTES // weight.num_inputs // BLOCK) * BLOCK
        size = min(weight.num_outputs, most)
        room = x.new_empty(size, weight.num_inputs, dtype=torch.uint8)
        for begin in range(0, weight.num_outputs, size):
            end = min(begin + size, weight.num_outputs)
            product = self._multiply(codes, scales, room[: end - begin], begin, bias)[:num_rows]
            if end - begin == weight.num_outputs:
                return product
            out[:, begin:end] = product
        return out

    def _multiply(
        self, codes: Tensor, scales: Tensor, room: Tensor, begin: int, bias: Tensor | None
    ) -> Tensor:
        """The outputs from `begin` on, whose codes are put into `room` [n, in]."""
        weight, end = self.weight, begin + len(room)
        # Words of 8 codes are copied faster than codes.
        words = room.view(torch.int64).view(len(room), weight.num_steps, -1)
        words.copy_(weight.codes.view(torch.int64)[:, begin:end].transpose(0, 1))
        kinds, of_weight = F.ScalingType, self.scales[:, begin:end]
        recipes = kinds.RowWise, kinds.RowWise
        if self.in_blocks:
            of_weight = self.scales[:, begin // BLOCK : end // BLOCK]
            recipes = kinds.BlockWise1x128, kinds.BlockWise128x128
        own_bias = None if bias is None else bias[begin:end]
        multiply: Callable[..., Tensor] = F.scaled_mm
        product = multiply(
            codes,
            room.view(torch.float8_e4m3fn).t(),
            scales,
            recipes[0],
            of_weight if self.in_blocks else of_weight.contiguous(),
            recipes[1],
            bias=None if self.in_blocks else own_bias,
            output_dtype=torch.bfloat16,
        )
        return product + own_bias if self.in_blocks and own_bias is not None else product


def coded_rows(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """`x` [T, in] in e4m3, with scales [T, in / width] float32, of which the first axis is the dense one.

    With several groups, rows of zeros follow up to a multiple of ROWS.
    """
    (num_rows, num_inputs), groups = x.shape, x.shape[1] // width
    rows = num_rows if groups == 1 else triton.cdiv(num_rows, ROWS) * ROWS
    codes = x.new_empty(rows, num_inputs, dtype=torch.uint8)
    # One scale of a row is a contiguous column: the library looks at strides of axes without length, too.
    scales = x.new_empty(groups, rows, dtype=torch.float32)
    scales = scales.view(rows, 1) if groups == 1 else scales.t()
    columns = min(COLUMNS, triton.next_power_of_2(width))
    code_rows[(rows, groups)](
        codes,
        scales,
        x,
        num_rows,
        x.stride(0),
        *scales.stride(),
        width,
        columns=columns,
        num_warps=4,
    )
    return codes.view(torch.float8_e4m3fn), scales


def multiplies(format_: CodeFormat, device: torch.device) -> bool:
    """Whether `device` has products of that format, if the shape and scales of a weight fit."""
    if not format_.e4m3_inputs or not converts_e4m3(device):
        return False
    return format_.group_size is None or (format_.group_size == BLOCK and _has_blocks(device))


def _has_blocks(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == BLOCKS_ON


def _scales_of_blocks(weight: PackedCodes, scales: Tensor) -> Tensor | None:
    """`scales` [groups, out] of blocks as the library reads them; None if they are not of blocks that it has here."""
    if not _has_blocks(weight.codes.device):
        return None
    if weight.group_size != BLOCK or weight.num_outputs % BLOCK or weight.num_inputs % BLOCK:
        return None
    blocks = scales.view(len(scales), -1, BLOCK)
    if not torch.equal(blocks, blocks[:, :, :1].expand_as(blocks)):
        return None
    return F.pad(blocks[:, :, 0].t(), (0, -len(scales) % ROWS)).contiguous().t()
