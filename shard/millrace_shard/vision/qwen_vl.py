"""The encoders of Qwen 2 VL, 2.5 VL, 3 VL and 3.5: images of any size, patches rotated by row and column.

Patches are in the order of the features that are made of them: a square of `shuffle` patches a side after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.elementwise import elementwise
from millrace_shard.vision.parts import (
    Rotation,
    Split,
    SplitLayer,
    Windows,
    rotated,
    run_parts,
)
from millrace_shard.vision.qwen_vl_spec import EPS, FRAMES, PREFIX, QwenSpec
from millrace_shard.vision.spec import (
    CHANNELS,
    PARTS,
    EncoderActivation,
    EncoderSpec,
    VisionSpec,
)
from millrace_shard.vision.tower import LayerNorm, WeightReader, activated
from millrace_shard.weights.weights import Weights


class Grid(NamedTuple):
    """What the encoder needs to know of an image's size."""

    rotation: Rotation
    places: Tensor
    """[2, patches] int64, the row and the column of each patch."""
    size: tuple[int, int]
    """Rows and columns."""
    windows: Windows


class _State(NamedTuple):
    """An image before or inside a layer."""

    split: Split
    windows: Windows
    """Of layers whose patches do not see all others."""
    made: tuple[Tensor, ...] = ()
    """[rows, text_size] each: features for layers of the language model."""


class QwenTower:
    """The encoder and its merger, in the dtype of the model."""

    connector: ClassVar[str] = f"{PREFIX}patch_embed.proj.weight"

    def __init__(self, spec: VisionSpec, weights: Weights, kernels: Kernels) -> None:
        assert isinstance(spec, QwenSpec)
        encoder, reader = spec.encoder, WeightReader(weights, kernels)
        hidden, patch = encoder.hidden_size, encoder.patch_size
        self._spec, self._dtype = spec, weights.dtype
        bias = f"{PREFIX}patch_embed.proj.bias" if spec.patch_bias else None
        self._patches = reader.matrix(
            self.connector, bias, *(hidden, CHANNELS, FRAMES, patch, patch)
        )
        self._layers = [
            _Layer(reader, f"{PREFIX}blocks.{index}.", spec, kernels)
            for index in range(encoder.num_layers)
        ]
        self._merger = _Merger(reader, f"{PREFIX}merger.", spec, kernels)
        self._deepstack = {
            layer: _Merger(reader, f"{PREFIX}deepstack_merger_list.{index}.", spec, is_late=True)
            for index, layer in enumerate(spec.deepstack)
        }
        """By the layer after which they are made."""
        self._positions = _Positions(reader, encoder) if encoder.positions_per_side else None
        self._grid = lru_cache(maxsize=8)(partial(_grid, spec))
        self.digest = reader.digest

    def begin(self, pixels: Tensor) -> _State:
        """The first layer's input for an image [3, height, width] float32."""
        patch, device = self._spec.encoder.patch_size, pixels.device
        grid = self._grid(pixels.shape[1] // patch, pixels.shape[2] // patch, device)
        x = self._patches(cut(pixels.to(self._dtype), patch, self._spec.shuffle))
        if self._positions is not None:
            x = x + self._positions(grid)
        return _State(Split(x, grid.rotation), grid.windows)

    def run(self, image: _State, parts: slice) -> _State:
        """Run some parts of layers."""
        at, stop, _ = parts.indices(len(self._layers) * PARTS)
        split, made = image.split, image.made
        while at < stop:
            layer = at // PARTS
            end = min(stop, (layer + 1) * PARTS)
            is_full = layer in self._spec.full_layers
            split = replace(split, windows=() if is_full else image.windows)
            split = run_parts(self._layers, split, slice(at, end))
            if end % PARTS == 0 and layer in self._deepstack:
                made += (self._deepstack[layer](split.x),)
            at = end
        return _State(split, image.windows, made)

    def end(self, image: _State) -> Tensor:
        """Features [rows, row_size] of the last layer's result."""
        features = self._merger(image.split.x)
        return torch.cat([features, *image.made], dim=1) if image.made else features

    def extra(self) -> None:
        """An image has no further rows."""

    def __call__(self, pixels: Tensor) -> Tensor:
        """Features [rows, row_size] of an image [3, height, width] float32."""
        return self.end(self.run(self.begin(pixels), slice(None)))


class _Layer(SplitLayer):
    """Attention of patches to all patches or within windows, and a feed-forward half."""

    def __init__(self, reader: WeightReader, prefix: str, spec: QwenSpec, kernels: Kernels) -> None:
        encoder = spec.encoder
        hidden, inter = encoder.hidden_size, encoder.intermediate_size
        super().__init__(kernels, hidden // encoder.num_heads)
        self._num_heads, self._activation = encoder.num_heads, encoder.activation
        self._gated = spec.gated
        self._before_attention = _norm(reader, f"{prefix}norm1", spec, kernels)
        self._qkv = reader.linear(prefix, ("attn.qkv",), 3 * hidden, hidden)
        self._out = reader.linear(prefix, ("attn.proj",), hidden, hidden)
        self._before_mlp = _norm(reader, f"{prefix}norm2", spec, kernels)
        self._up = reader.linear(prefix, spec.names.up, inter, hidden)
        self._down = reader.linear(prefix, (spec.names.down,), hidden, inter)

    def project(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """Rotated queries and keys, and values, [rows, 3, heads, head_dim]."""
        assert rotation is not None
        heads = self._qkv(self._before_attention(x)).view(len(x), 3 * self._num_heads, -1)
        turned = heads[:, : 2 * self._num_heads]
        turned.copy_(rotated(turned, rotation))
        return heads.view(len(x), 3, self._num_heads, -1)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The output of some rows."""
        x = x + self._out(attended)
        up = self._up(self._before_mlp(x))
        inner = self._kernels.silu_mul(up) if self._gated else activated(up, self._activation)
        return x + self._down(inner)


class _Merger:
    """Makes features of squares of patches."""

    def __init__(
        self,
        reader: WeightReader,
        prefix: str,
        spec: QwenSpec,
        kernels: Kernels | None = None,
        *,
        is_late: bool = False,
    ) -> None:
        """`is_late` is whether the norm is over a square; without, it is over a patch, by `kernels`."""
        names = spec.names
        self._wide = spec.encoder.hidden_size * spec.shuffle**2
        self._is_late = is_late
        name = f"{prefix}{names.merger_norm}"
        self._norm: Callable[[Tensor], Tensor]
        if kernels is None:
            self._norm = LayerNorm(reader, name, self._wide, EPS)
        else:
            self._norm = _norm(reader, name, spec, kernels)
        first, last = names.merger
        self._first = reader.linear(prefix, (first,), self._wide, self._wide)
        self._last = reader.linear(prefix, (last,), spec.text_size, self._wide)

    def __call__(self, x: Tensor) -> Tensor:
        """[patches, hidden] to [rows, text_size]."""
        joined = x.view(-1, self._wide) if self._is_late else x
        joined = self._norm(joined).view(-1, self._wide)
        return self._last(activated(self._first(joined), EncoderActivation.GELU))


class _Positions:
    """Learned positions on a square; a patch has a mean of the four nearest."""

    def __init__(self, reader: WeightReader, spec: EncoderSpec) -> None:
        self._side = spec.positions_per_side
        name = f"{PREFIX}pos_embed.weight"
        self._values = reader.tensor(name, self._side**2, spec.hidden_size)

    def __call__(self, grid: Grid) -> Tensor:
        """[patches, hidden], in the dtype of the model."""
        rows, columns = (
            self._nearest(places, count)
            for places, count in zip(grid.places, grid.size, strict=True)
        )
        total = torch.zeros((), device=self._values.device)
        for row, of_row in rows:
            for column, of_column in columns:
                values = self._values[row * self._side + column].float()
                total = total + values * (of_row * of_column).unsqueeze(1)
        return total.to(self._values.dtype)

    def _nearest(self, places: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
        """Two positions, and the weight of each, for `places` [patches] among `count` that span the square."""
        at = places.float() * (self._side - 1) / max(count - 1, 1)
        low = at.floor()
        return [
            ((low.long() + offset).clamp(max=self._side - 1), (1 - (at - low - offset).abs()))
            for offset in (0, 1)
        ]


def _norm(
    reader: WeightReader, name: str, spec: QwenSpec, kernels: Kernels
) -> Callable[[Tensor], Tensor]:
    if not spec.gated:
        return LayerNorm(reader, name, spec.encoder.hidden_size, EPS)
    weight = reader.tensor(f"{name}.weight", spec.encoder.hidden_size)
    return lambda x: kernels.rms_norm(x, weight, EPS)


def cut(pixels: Tensor, patch: int, merge: int) -> Tensor:
    """The patches of an image [3, height, width], in the order of features: [patches, 3 * FRAMES * patch * patch]."""
    rows, columns = (size // (patch * merge) for size in pixels.shape[1:])
    cells = pixels.reshape(CHANNELS, rows, merge, patch, columns, merge, patch)
    cells = cells.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
    return cells.expand(*(-1,) * 5, FRAMES, -1, -1).reshape(-1, CHANNELS * FRAMES * patch * patch)


def _grid(spec: QwenSpec, rows: int, columns: int, device: torch.device) -> Grid:
    """Of an image of `rows` * `columns` patches."""
    merge, quarter = spec.shuffle, spec.encoder.hidden_size // spec.encoder.num_heads // 4
    frequencies = 1.0 / spec.theta ** (torch.arange(quarter, dtype=torch.float) / quarter)
    angles = torch.arange(max(rows, columns)).float()[:, None] * frequencies
    places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
    cells = places.view(2, rows // merge, merge, columns // merge, merge).transpose(2, 3)
    by_row, by_column = cells.reshape(2, -1)
    cosines, sines = (
        torch.cat([table[by_row], table[by_column]], dim=1)[:, None].to(device)
        for table in (elementwise(of_angle, angles) for of_angle in (torch.cos, torch.sin))
    )
    return Grid(
        rotation=(cosines, sines),
        places=cells.reshape(2, -1).to(device),
        size=(rows, columns),
        windows=tuple(each.to(device) for each in _windows(spec, rows // merge, columns // merge)),
    )


def _windows(spec: QwenSpec, rows: int, columns: int) -> list[Tensor]:
    """The patches of each window over a grid of `rows` * `columns` features, as in Grid."""
    side, per_cell = spec.window, spec.shuffle**2
    if not side:
        return []
    cells = torch.arange(rows * columns).view(rows, columns)
    by_size: dict[int, list[Tensor]] = {}
    for row in range(0, rows, side):
        for column in range(0, columns, side):
            inside = cells[row : row + side, column : column + side].reshape(-1, 1)
            patches = (inside * per_cell + torch.arange(per_cell)).flatten()
            by_size.setdefault(len(patches), []).append(patches)
    return [torch.stack(each) for each in by_size.values()]
