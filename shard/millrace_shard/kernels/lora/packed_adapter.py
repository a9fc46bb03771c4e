"""An adapter in the layouts of the linears of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.kernels.lora.lora_site import Packing

SLICE = 16
"""Ranks of a slice, and the multiple to which outputs are rounded up."""
DEPTH = 32
"""The multiple to which inputs are rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedPart:
    """The summand of an adapter for one module: `((x Aᵀ) * factors) Bᵀ + bias`, with ranks padded to slices of 16."""

    a: Tensor
    """Plain: [16 * slices, inputs of this rank] in the model's dtype; tiles: as `pack_lora_a` returns it.

    Slices: as plain, with inputs rounded up to a multiple of 32.
    """
    b: Tensor
    """Plain: [outputs of this rank, 16 * slices] in the model's dtype; tiles: as `pack_lora_b` returns it.

    Slices: [slices, outputs of this rank rounded up to a multiple of 16, 16] in the model's dtype.
    """
    factors: Tensor
    """[16 * slices] float32, zeros past the last rank."""
    bias: Tensor | None
    """[outputs of this rank] float32, unless plain rounded up to a multiple of 16; None if this rank adds none."""
    num_slices: int


def pack_part(
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    packing: Packing,
    device: torch.device,
) -> PackedPart:
    """Pack one module: `a` [r, in] and `b` [out, r] in the model's dtype, `scales` [r] and `bias` [out] float32.

    The result has memory of its own on `device`.
    """
    rank, padding = len(scales), -len(scales) % SLICE
    if packing == "tiles":
        a = torch.ops.millrace.pack_lora_a(a.contiguous())
        b = torch.ops.millrace.pack_lora_b(b.contiguous())
    elif packing == "slices":
        a = F.pad(a, (0, -a.shape[1] % DEPTH, 0, padding))
        b = F.pad(b, (0, padding, 0, -len(b) % SLICE))
        b = b.view(len(b), -1, SLICE).transpose(0, 1)
    else:
        a, b = F.pad(a, (0, 0, 0, padding)), F.pad(b, (0, padding))

    if packing != "plain" and bias is not None:
        bias = F.pad(bias, (0, -len(bias) % SLICE))

    def own(values: Tensor) -> Tensor:
        return values.to(device, copy=True).contiguous()

    return PackedPart(
        a=own(a),
        b=own(b),
        factors=own(F.pad(scales, (0, padding))),
        bias=None if bias is None else own(bias),
        num_slices=-(-rank // SLICE),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedAdapter:
    """An adapter that is ready for use on this rank."""

    digest: str
    parts: Mapping[int, PackedPart]
    """By the place of the module among all parts of the model; other modules are those of the base."""
    num_pages: int
    """Pages of 64 KiB that it counts for."""
    first_page: int | None = None
    """Its place in the memory that is reserved for adapters; None if its tensors are allocations of their own."""

    @property
    def most_slices(self) -> int:
        """The most slices of a module."""
        return max((part.num_slices for part in self.parts.values()), default=0)
