"""The encoder that two files of a model describe, what pages of families read of them, and the table of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millrace_shard.batch.sequence_images import Mask
from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.config import ConfigReader, is_number
from millrace_shard.models.families.registry import FAMILIES as TEXT_FAMILIES

PREPROCESSOR = "preprocessor_config.json"
PROCESSORS = "processor_config.json"
"""In newer checkpoints, with the object of PREPROCESSOR under `image_processor`."""
LARGEST_SIDE = 4096
"""Pixels of the longer side of an image before it is cut into tiles, in the processors of transformers."""
CHANNELS = 3
BYTES = 256
PARTS = 8
"""Parts of a layer, of about the same cost, of which a step may run some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelSpec:
    """How bytes become the encoder's inputs: (byte * scale - mean) / std."""

    scale: float
    mean: tuple[float, ...]
    """Of each channel."""
    std: tuple[float, ...]

    def table(self) -> Tensor:
        """[3, 256] float32, the input for each channel and byte, with the bits of transformers' processors for PIL."""
        values = (np.arange(BYTES, dtype=np.uint8).astype(np.float64) * self.scale).astype(
            np.float32
        )
        mean, std = (np.array(each, dtype=np.float32)[:, None] for each in (self.mean, self.std))
        return torch.from_numpy((values - mean) / std)


class EncoderActivation(Enum):
    """The function between the two linears of an encoder's feed-forward half, by its name in config.json."""

    GELU_TANH = "gelu_pytorch_tanh"
    GELU = "gelu"
    QUICK_GELU = "quick_gelu"
    """`x * sigmoid(1.702 * x)`."""
    SILU = "silu"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """A SigLIP or CLIP encoder of square tiles, each of which is encoded by itself."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    """Layers that run."""
    num_heads: int
    patch_size: int
    positions_per_side: int
    """Learned positions; a tile of fewer patches uses some of them."""
    eps: float
    activation: EncoderActivation = EncoderActivation.GELU_TANH
    has_class: bool = False
    """Whether it is CLIP's: with a row for the whole tile before the rows of patches, and a norm before the layers."""
    ends_with_norm: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """How a model reads images."""

    family: str
    """`model_type` of config.json, or of the encoder in it."""
    encoder: EncoderSpec
    pixels: PixelSpec
    tile_size: int
    """Pixels of a side of a tile."""
    max_tiles: int
    """Tiles of the largest image, with the one that shows all of it."""
    shuffle: int
    """A square of so many patches a side becomes one feature."""
    text_size: int
    """Numbers of a feature: the hidden size of the language model."""
    image_token_id: int
    mask: Mask = Mask.CAUSAL
    is_whole: bool = False
    """Whether a tile has a patch for each position of the encoder."""
    extra_rows: int = 0
    """Rows of each image behind its tiles' rows, with features that are the same for all images."""
    cell: int = 0
    """Not 0: an image is one tile of any size up to `tile_size`, and a feature is a square of so many pixels a side."""
    max_grid_tiles: int = 0
    """Not 0: the features of a grid of tiles become fewer if it has more tiles, roughly, without its padding."""
    has_axes: bool = False
    """Whether tokens of an image have its rows and columns as positions."""

    def __post_init__(self) -> None:
        """Raise UnsupportedModel unless patches and features fit into a tile of one size."""
        if self.cell:
            return
        encoder, side = self.encoder, self.patches_per_side
        fits = side <= encoder.positions_per_side and not side % self.shuffle
        if self.is_whole:
            fits = fits and side == encoder.positions_per_side
        # An encoder whose patches do not fill its tiles leaves out pixels on the right and at the bottom.
        if not fits or (self.tile_size % encoder.patch_size and not self.is_whole):
            raise UnsupportedModel(
                f"tiles of {self.tile_size} pixels do not fit patches of {encoder.patch_size} pixels, {self.shuffle}"
                f" a side of a feature, and {encoder.positions_per_side} positions a side"
            )

    @property
    def patches_per_side(self) -> int:
        return self.tile_size // self.encoder.patch_size

    @property
    def rows_per_tile(self) -> int:
        """Features of a tile, of the largest one with `cell`."""
        return (self.patches_per_side // self.shuffle) ** 2

    @property
    def row_size(self) -> int:
        """Numbers that are kept of a feature."""
        return self.text_size

    @property
    def num_layers(self) -> int:
        """Parts of layers, for the router, which counts them as layers."""
        return self.encoder.num_layers * PARTS

    def refusal(self, num_tiles: int, height: int, width: int) -> str | None:
        """Why the model does not read tiles of this size, or so many; None if it does."""
        side, cell = self.tile_size, self.cell
        if cell and any(each % cell or not 0 < each <= side for each in (height, width)):
            return f"the image has {width} x {height} pixels, and the model reads multiples of {cell} up to {side}"
        if not cell and (height, width) != (side, side):
            return f"tiles have {width} x {height} pixels, and the model reads {side} x {side}"
        if not 0 < num_tiles <= self.max_tiles:
            return f"an image of {num_tiles} tiles; 1 to {self.max_tiles} are read"
        return None

    def rows_of(self, height: int, width: int) -> int:
        """Features of a tile of so many pixels."""
        return (height // self.cell) * (width // self.cell) if self.cell else self.rows_per_tile


def part(config: ConfigReader, name: str, defaults: Mapping[str, Any]) -> ConfigReader:
    """The object `name` of a config.json; an empty one if there is none."""
    fields = config.value(name)
    if fields is not None and not isinstance(fields, dict):
        raise UnsupportedModel(f"{name}={fields!r} must be an object")
    return ConfigReader(fields or {}, defaults)


def text_size(config: ConfigReader) -> int:
    """The hidden size of the language model."""
    return _text(config).count("hidden_size")


def check_window(config: ConfigReader, num_tokens: int) -> None:
    """Refuse a window of the language model that is shorter than so many tokens, which see each other in transformers.

    Raises UnsupportedModel.
    """
    window = _text(config).optional_count("sliding_window")
    if window is not None and window < num_tokens:
        raise UnsupportedModel(
            f"sliding_window={window} is not supported: an image has {num_tokens} tokens"
        )


def _text(config: ConfigReader) -> ConfigReader:
    """The fields of the language model, with the defaults of its class."""
    family = TEXT_FAMILIES.get(part(config, "text_config", {}).model_type)
    return part(config, "text_config", {} if family is None else family.defaults)


def token_id(config: ConfigReader) -> int:
    """The placeholder, which some classes in transformers call by two names."""
    own = config.value("image_token_id")
    return config.whole("image_token_index" if own is None else "image_token_id")


def square(processor: ConfigReader, name: str = "size") -> int:
    """The side of the square that images become, in pixels, by the object `name`."""
    size = part(processor, name, {})
    side = size.count("height")
    if side != size.count("width") or side > LARGEST_SIDE:
        raise UnsupportedModel(
            f"{PREPROCESSOR}: {name}={processor.value(name)!r} must be a square of at most {LARGEST_SIDE} pixels"
        )
    return side


def siglip(config: ConfigReader) -> EncoderSpec:
    """The encoder by a `vision_config` whose defaults are SIGLIP's, unless the family has others."""
    if config.count("num_channels") != CHANNELS:
        raise UnsupportedModel("vision_config: num_channels must be 3")
    names = [each.value for each in EncoderActivation]
    if (name := config.value("hidden_act")) not in names:
        raise UnsupportedModel(f"vision_config: hidden_act={name!r} is not one of {names}")
    size, patch = config.count("image_size"), config.count("patch_size")
    spec = EncoderSpec(
        hidden_size=config.count("hidden_size"),
        intermediate_size=config.count("intermediate_size"),
        num_layers=config.count("num_hidden_layers"),
        num_heads=config.count("num_attention_heads"),
        patch_size=patch,
        positions_per_side=size // patch,
        eps=config.number("layer_norm_eps"),
        activation=EncoderActivation(name),
    )
    if spec.hidden_size % spec.num_heads:
        raise UnsupportedModel(
            f"vision_config: {spec.num_heads} heads do not divide hidden_size={spec.hidden_size}"
        )
    return spec


def pixels(processor: ConfigReader) -> PixelSpec:
    """What preprocessor_config.json says of the values of pixels."""
    is_scaled, is_normalised = processor.flag("do_rescale"), processor.flag("do_normalize")
    zeros, ones = (0.0,) * CHANNELS, (1.0,) * CHANNELS
    return PixelSpec(
        scale=processor.number("rescale_factor") if is_scaled else 1.0,
        mean=_of_channels(processor, "image_mean") if is_normalised else zeros,
        std=_of_channels(processor, "image_std") if is_normalised else ones,
    )


def _of_channels(processor: ConfigReader, name: str) -> tuple[float, ...]:
    value = processor.value(name)
    values = value if isinstance(value, list) else [value] * CHANNELS
    if len(values) != CHANNELS or not all(map(is_number, values)):
        raise UnsupportedModel(f"{PREPROCESSOR}: {name}={value!r} must be {CHANNELS} numbers")
    if name == "image_std" and not all(each > 0 for each in values):
        raise UnsupportedModel(f"{PREPROCESSOR}: {name}={value!r} must be positive")
    return tuple(map(float, values))


PROCESSOR: Mapping[str, Any] = {
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""Defaults of most processors in transformers."""
SIGLIP: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
"""Defaults of the class of SigLIP's encoder in transformers."""
