"""An adapter in the layouts of the linears of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedPart:
    """What an adapter adds to one module: `((x Aᵀ) * factors) Bᵀ + bias`, with ranks padded to slices of 16."""

    a: Tensor
    """Plain: [16 * slices, inputs of this rank] in the model's dtype; tiles: as `pack_lora_a` returns it."""
    b: Tensor
    """Plain: [outputs of this rank, 16 * slices] in the model's dtype; tiles: as `pack_lora_b` returns it."""
    factors: Tensor
    """[16 * slices] float32, zeros past the last rank."""
    bias: Tensor | None
    """[outputs of this rank] float32, with tiles rounded up to a multiple of 16; None if this rank adds none."""
    num_slices: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedAdapter:
    """An adapter that is ready for use on this rank."""

    digest: str
    parts: Mapping[int, PackedPart]
    """By the place of the module among all parts of the model; other modules are those of the base."""
    num_pages: int
    """Pages of 64 KiB that it counts for."""
