"""Cuts layers of an encoder into parts, so that a step may run less than a layer while answers run.

A layer projects rows to heads, attends head by head, and goes on row by row: two parts of rows, two of heads, and four
of rows, which cost about the same. A row's bits depend neither on other rows nor on the parts, as long as the
kernels are deterministic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from millrace_shard.device.pulse import PULSE
from millrace_shard.kernels.base import Kernels
from millrace_shard.vision.spec import PARTS

Windows = tuple[Tensor, ...]
"""[windows, patches of each] int64, for each size of windows; empty: patches see all others."""
Rotation = tuple[Tensor, Tensor]
"""Cosines and sines [patches, 1, head_dim / 2] float32."""
ALIGNMENT = 32
"""Parts of rows are multiples of it, so that products run over whole tiles."""
WINDOWS_AT_ONCE = 16
"""Windows that are attended in one call."""


class SplitLayer(ABC):
    """A layer whose rows are independent of each other but in `attend`, where its heads are."""

    def __init__(self, kernels: Kernels, head_dim: int) -> None:
        self._kernels = kernels
        self._scale = head_dim**-0.5

    @abstractmethod
    def project(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """Queries, keys and values [rows, 3, heads, head_dim] of [rows, hidden], rotated if there is a rotation."""

    @abstractmethod
    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output for some rows of its input and of attention, all [rows, hidden]."""

    def attend(self, heads: Tensor, windows: Windows) -> Tensor:
        """[patches, heads * head_dim] of some heads [patches, 3, heads, head_dim]."""
        if not windows:
            return self._kernels.attend_whole(*heads.unbind(1), scale=self._scale)
        out = heads.new_empty(len(heads), heads[0, 0].numel())
        for index in (part for each in windows for part in torch.split(each, WINDOWS_AT_ONCE)):
            # To attention, a head in another window is another head.
            inside = heads[index].permute(2, 1, 0, 3, 4).flatten(2, 3)
            attended = self._kernels.attend_whole(*inside, scale=self._scale)
            by_window = attended.view(index.shape[1], len(index), -1)
            out[index] = by_window.transpose(0, 1)
        return out


@dataclass(frozen=True, slots=True)
class Split:
    """A tile before, or inside, a layer."""

    x: Tensor
    """[patches, hidden], the layer's input."""
    rotation: Rotation | None = None
    windows: Windows = ()
    heads: Tensor | None = None
    """Queries, keys and values of the first rows, [rows, 3, heads, head_dim]."""
    attended: Tensor | None = None
    """Of the first heads, [patches, heads * head_dim]."""
    out: Tensor | None = None
    """The first rows of the layer's output, [rows, hidden]."""


def run_parts(layers: Sequence[SplitLayer], tile: Split, parts: slice) -> Split:
    """Run parts of layers, of which each has PARTS; successive ones of a kind are computed at once."""
    at, stop, _ = parts.indices(len(layers) * PARTS)
    while at < stop:
        layer, part = divmod(at, PARTS)
        first, count, run = next(kind for kind in _KINDS if part < kind[0] + kind[1])
        end = min(first + count, part + stop - at)
        tile = run(layers[layer], tile, part - first, end - first)
        PULSE.advance()
        at += end - part
    return tile


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the halves of each head of [patches, heads, head_dim], in float32."""
    cosines, sines = rotation
    first, second = x.float().chunk(2, dim=-1)
    halves = first * cosines - second * sines, second * cosines + first * sines
    return torch.cat(halves, dim=-1).to(x.dtype)


def _project(layer: SplitLayer, tile: Split, begin: int, end: int) -> Split:
    rows, rotation = _rows(tile.x, begin, end, _ROWS), tile.rotation
    if rows.start == rows.stop:
        return tile
    if rotation is not None:
        rotation = rotation[0][rows], rotation[1][rows]
    return replace(tile, heads=_joined(tile.heads, layer.project(tile.x[rows], rotation), 0))


def _attend(layer: SplitLayer, tile: Split, begin: int, end: int) -> Split:
    assert tile.heads is not None
    count = tile.heads.shape[2]
    some = tile.heads[:, :, count * begin // _HEADS : count * end // _HEADS]
    if not some.shape[2]:
        return tile
    return replace(tile, attended=_joined(tile.attended, layer.attend(some, tile.windows), 1))


def _finish(layer: SplitLayer, tile: Split, begin: int, end: int) -> Split:
    assert tile.attended is not None
    rows, out = _rows(tile.x, begin, end, _LAST_ROWS), tile.out
    if rows.start < rows.stop:
        out = _joined(out, layer.finish(tile.x[rows], tile.attended[rows]), 0)
    if end < _LAST_ROWS:
        return replace(tile, out=out)
    assert out is not None
    return Split(out, tile.rotation, tile.windows)


def _rows(x: Tensor, begin: int, end: int, count: int) -> slice:
    """The rows of parts `begin` to `end` of `count`; the last ones may have none."""
    each = -(-len(x) // (count * ALIGNMENT)) * ALIGNMENT
    return slice(min(begin * each, len(x)), min(end * each, len(x)))


def _joined(before: Tensor | None, new: Tensor, dim: int) -> Tensor:
    return new if before is None else torch.cat((before, new), dim)


_ROWS, _HEADS, _LAST_ROWS = 2, 2, 4
_KINDS: Sequence[tuple[int, int, Callable[[SplitLayer, Split, int, int], Split]]] = (
    (0, _ROWS, _project),
    (_ROWS, _HEADS, _attend),
    (_ROWS + _HEADS, _LAST_ROWS, _finish),
)
"""(first part, parts, what runs them)."""
assert _ROWS + _HEADS + _LAST_ROWS == PARTS
