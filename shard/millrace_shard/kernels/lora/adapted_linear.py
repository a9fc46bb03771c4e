"""A linear with the adapters of its rows, in plain torch over the results of any kernels."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.kernels.lora.adapter_table import LoraSite, PackedPart

ROWS = 32
"""Rows of one product in deterministic mode, since libraries select a kernel by the number of rows."""


class Product(Protocol):
    """A linear of any kernels, as `base.Linear`."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""


def adapted(linear: Product, site: LoraSite | None, *, deterministic: bool) -> Product:
    """`linear` with the adapters of `site`; `linear` itself without a site."""
    return linear if site is None else AdaptedLinear(linear, site, deterministic=deterministic)


class AdaptedLinear:
    """A linear to whose results the deltas of adapters are added; rows without an adapter are not touched."""

    def __init__(self, linear: Product, site: LoraSite, *, deterministic: bool) -> None:
        self._linear = linear
        self._site = site
        self._product = _fixed_product if deterministic else F.linear

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        y = self._linear(x)
        rows = self._site.rows
        if rows is None:
            return y
        site = self._site
        for group in rows.groups:
            inputs: Tensor | None = None
            for offset, part in enumerate(site.parts):
                packed = site.table.part(group.slot, site.first + offset)
                if packed is None:
                    continue
                if inputs is None:
                    inputs = x.index_select(0, group.rows).float()
                end = part.first_output + part.num_outputs
                self._add(y[:, part.first_output : end], group.rows, inputs, packed)
        return y

    def _add(self, y: Tensor, rows: Tensor, x: Tensor, part: PackedPart) -> None:
        """Add the delta of the inputs `x` [n, in] float32 to `rows` [n] of `y` [T, outputs of the part] in place."""
        shrunk = self._product(x, part.a.float()) * part.factors
        delta = self._product(shrunk, part.b.float())
        if part.bias is not None:
            delta = delta + part.bias
        y.index_copy_(0, rows, (y.index_select(0, rows).float() + delta).to(y.dtype))


def _fixed_product(x: Tensor, weight: Tensor) -> Tensor:
    """`x` [n, in] times `weight` [out, in], ROWS rows at a time."""
    padded = F.pad(x, (0, 0, 0, -len(x) % ROWS))
    tiles = [F.linear(rows, weight) for rows in torch.split(padded, ROWS)]
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[: len(x)]
