"""Encodes images: holds their pixels by slot, and writes the features of one tile after the other."""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.batch.sequence_images import FeatureRows, Mask
from millrace_shard.batch.step import StepResult
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.device.transfers import start_download, upload
from millrace_shard.errors import ImageInvalid, StepInvalid, UnsupportedModel
from millrace_shard.kernels.base import Kernels
from millrace_shard.vision.grid_reduction import GridReduction
from millrace_shard.vision.registry import FAMILIES, AnyTower
from millrace_shard.vision.spec import CHANNELS, VisionSpec
from millrace_shard.weights.checkpoint_files import SINGLE
from millrace_shard.weights.gguf.known_folders import MMPROJ
from millrace_shard.weights.weights import Weights

IMAGE_SLOTS = 8
"""Images whose pixels are held at a time. The next ones arrive while one is encoded."""

Pixels = NDArray[np.uint8]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSize:
    """What the router says of an image before its pixels, and where it belongs."""

    slot: int
    first_row: int
    """Of the features of its first tile."""
    digest: bytes
    num_tiles: int
    height: int
    """Pixels of a tile."""
    width: int
    reduction: GridReduction | None = None
    """What becomes of the features of all tiles but the last."""

    @property
    def num_bytes(self) -> int:
        return self.num_tiles * CHANNELS * self.height * self.width

    def filled(self, parts: Iterable[bytes]) -> Pixels:
        """The pixels [num_tiles, 3, height, width] that `parts` have together.

        Raises ImageInvalid for another number of bytes.
        """
        pixels: Pixels = np.empty(self.num_bytes, dtype=np.uint8)
        end = 0
        for part in parts:
            start, end = end, end + len(part)
            if end > self.num_bytes:
                break
            pixels[start:end] = np.frombuffer(part, dtype=np.uint8)
        if end != self.num_bytes:
            more = "at least " if end > self.num_bytes else ""
            raise ImageInvalid(
                f"{more}{end} bytes of pixels came, and {self.num_tiles} tiles of {self.width} x {self.height}"
                f" pixels have {self.num_bytes}"
            )
        return pixels.reshape(self.num_tiles, CHANNELS, self.height, self.width)


@dataclass(frozen=True, slots=True)
class Vision:
    """The loaded encoder of a model, which every rank has as a whole."""

    spec: VisionSpec
    tower: AnyTower
    table: Tensor
    """See `PixelSpec.table`; on the device."""
    digest: int
    """Of settings and weights, below 2^64."""

    def check(self, size: ImageSize) -> None:
        """Raise ImageInvalid unless the model reads tiles of this size, and so many."""
        spec, reduction = self.spec, size.reduction
        refusal = spec.refusal(size.num_tiles, size.height, size.width)
        if refusal is None and reduction is not None:
            refusal = reduction.refusal(spec, size.num_tiles - 1)
        if refusal is not None:
            raise ImageInvalid(refusal)

    def encode(self, pixels: Pixels) -> Tensor:
        """Features [rows, row_size] of a tile [3, height, width]."""
        return self.tower(self.inputs(pixels))

    def inputs(self, pixels: Pixels) -> Tensor:
        """The tower's input for a tile, both [3, height, width]."""
        values = upload(pixels, self.table.device).view(CHANNELS, -1)
        return self.table.gather(1, values.long()).view(CHANNELS, *pixels.shape[1:])


def load_vision(
    spec: VisionSpec, folder: Path, *, dtype: torch.dtype, kernels: Kernels, device: torch.device
) -> Vision | None:
    """Read the encoder of the checkpoint in `folder`; None if the files have only the text model. Raises ModelError."""
    single, file = ProcessGroup.single(), MMPROJ if (folder / MMPROJ).is_file() else SINGLE
    with closing(Weights(folder, dtype=dtype, device=device, group=single, file=file)) as weights:
        make = FAMILIES[spec.family].tower
        if make.connector not in weights:
            if spec.mask is Mask.PROMPT:
                raise UnsupportedModel(f"the files of {folder} lack the encoder of images")
            logger.warning("images are refused, since the files of %s lack an encoder", folder)
            return None
        tower = make(spec, weights, kernels)
    digest = hashlib.sha256(f"{spec} {dtype}".encode() + tower.digest).digest()
    return Vision(spec, tower, spec.pixels.table().to(device), int.from_bytes(digest[:8], "big"))


@dataclass(frozen=True, slots=True)
class EncodedTiles:
    """Features of a step's tiles on the way to the host."""

    slots: Sequence[int]
    features: Sequence[Tensor]
    """Of each tile, [rows, row_size]."""

    def add_to(self, result: StepResult) -> StepResult:
        """`result` with their checksum and the slots whose features are not finite. The step must be done."""
        failed = dict.fromkeys(
            slot
            for slot, features in zip(self.slots, self.features, strict=True)
            if not features.isfinite().all()
        )
        checksum = 0
        for features in self.features:
            bits = features.contiguous().view(torch.uint8).numpy().tobytes()
            checksum = zlib.crc32(bits, checksum)
        return replace(result, failed_images=tuple(failed), checksum=checksum)


class _Begun(NamedTuple):
    """A tile of which some layers are computed."""

    unit: int
    num_layers: int
    result: Any
    """Of the layers so far, as the tower takes it."""


class ImageEncoder:
    """The images of an epoch. Only the engine's thread calls it."""

    def __init__(self, vision: Vision, features: FeatureRows) -> None:
        self._vision = vision
        self.features = features
        self._images: dict[int, tuple[ImageSize, Pixels]] = {}
        self._begun: dict[int, _Begun] = {}
        """By slot."""

    def clear(self) -> None:
        """Forget all pixels; features stay."""
        self._images.clear()
        self._begun.clear()

    def free(self, slots: Ints) -> None:
        """Forget the pixels in `slots`, which may be empty."""
        for slot in slots.tolist():
            self._images.pop(slot, None)
            self._begun.pop(slot, None)

    def put(self, size: ImageSize, pixels: Pixels) -> None:
        """Put an image into its slot. Raises ImageInvalid, and changes nothing then."""
        if size.slot >= IMAGE_SLOTS:
            raise ImageInvalid(f"image slot {size.slot} is not one of {IMAGE_SLOTS}")
        spec = self._vision.spec
        num_rows = size.num_tiles * spec.rows_of(size.height, size.width) + spec.extra_rows
        if size.first_row + num_rows > len(self.features):
            raise ImageInvalid(
                f"{num_rows} features from row {size.first_row} on are more than the"
                f" {len(self.features)} rows"
            )
        if (held := self._images.get(size.slot)) is not None and held[0] != size:
            raise ImageInvalid(f"image slot {size.slot} has another image, which was not freed")
        self._images[size.slot] = size, pixels

    def encode(self, slots: Ints, units: Ints, layers: Ints) -> EncodedTiles:
        """Run `layers[i]` layers, or all, for tile `units[i]` of the image in `slots[i]`, one tile at a time.

        The features of a tile are written after its last layer. Raises StepInvalid.
        """
        if len(slots) != len(units) or len(layers) not in {0, len(units)}:
            raise StepInvalid(
                f"{len(layers)} counts of layers for {len(units)} tiles of {len(slots)} images"
            )
        most = self._vision.spec.num_layers
        counts = layers.tolist() or [most] * len(units)
        done, features = list[int](), list[Tensor]()
        for slot, unit, count in zip(slots.tolist(), units.tolist(), counts, strict=True):
            encoded = self._encode(slot, unit, count)
            if encoded is not None:
                done.append(slot)
                features.append(start_download(encoded))
        return EncodedTiles(done, features)

    def _encode(self, slot: int, unit: int, count: int) -> Tensor | None:
        """Run layers for a tile; its features if these are the last ones."""
        if slot not in self._images or unit >= self._images[slot][0].num_tiles:
            raise StepInvalid(f"tile {unit} of an image in slot {slot} is not there")
        spec, tower = self._vision.spec, self._vision.tower
        size, pixels = self._images[slot]
        begun = self._begun.pop(slot, None)
        if begun is None:
            begun = _Begun(unit, 0, tower.begin(self._vision.inputs(pixels[unit])))
        end = begun.num_layers + count
        if begun.unit != unit or not begun.num_layers < end <= spec.num_layers:
            raise StepInvalid(
                f"{count} layers of tile {unit} cannot follow {begun.num_layers} of tile {begun.unit}"
            )
        result = tower.run(begun.result, slice(begun.num_layers, end))
        if end < spec.num_layers:
            self._begun[slot] = _Begun(unit, end, result)
            return None
        encoded = tower.end(result)
        self.features.write(size.first_row + unit * len(encoded), encoded)
        if size.reduction is not None and unit == size.num_tiles - 1:
            grid = self.features.values[size.first_row :][: unit * len(encoded)]
            self.features.write(size.first_row, size.reduction.of(grid.view(unit, *encoded.shape)))
        if (extra := tower.extra()) is not None:
            self.features.write(size.first_row + size.num_tiles * spec.rows_per_tile, extra)
        return encoded
