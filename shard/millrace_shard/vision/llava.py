"""LLaVA 1.5, LLaVA-NeXT and LLaVA-OneVision: a tile, or a grid of tiles behind it, whose patches are projected by two
linears.

The latter two leave out patches that are padding, and end each row of patches with a learned feature: which rows of
features are in a prompt, and in which order, the router says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from torch import Tensor

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.config import ConfigReader
from millrace_shard.vision.spec import (
    PREPROCESSOR,
    PROCESSOR,
    SIGLIP,
    EncoderActivation,
    EncoderSpec,
    VisionSpec,
    part,
    pixels,
    siglip,
    square,
    text_size,
    token_id,
)
from millrace_shard.vision.tower import Tower, WeightReader, activated

_CONFIG = {
    "image_token_index": 32_000,
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True,
}
_ONEVISION = {
    **_CONFIG,
    "image_token_index": 151_646,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "vision_aspect_ratio": "anyres_max_9",
}
_CLIP = {**SIGLIP, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_OF_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_SIZES = {"crop_size": {"height": 224, "width": 224}, "size": {"height": 384, "width": 384}}
_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_GRIDS_OF_ONEVISION = [list(pair) for pair in product(range(384, 2305, 384), repeat=2)]
_MOST_TILES = 64
_ASPECTS = re.compile(r"anyres_max_([1-9][0-9]?)")


def read(raw: Mapping[str, Any], raw_processor: Mapping[str, Any]) -> VisionSpec:
    """The spec by the objects of config.json and preprocessor_config.json. Raises UnsupportedModel."""
    is_onevision = raw.get("model_type") == "llava_onevision"
    config = ConfigReader(raw, _ONEVISION if is_onevision else _CONFIG)
    processor = ConfigReader(raw_processor, {**PROCESSOR, **_OF_CLIP, **_SIZES})
    config.check("projector_hidden_act", ("gelu",))
    config.check("multimodal_projector_bias", (True,))
    side = square(processor, "size" if is_onevision else "crop_size")
    has_grid = config.model_type != "llava"
    return VisionSpec(
        family=config.model_type,
        encoder=_encoder(config),
        pixels=pixels(processor),
        tile_size=side,
        max_tiles=1 + (_most_tiles(config, side) if has_grid else 0),
        shuffle=1,
        text_size=text_size(config),
        image_token_id=token_id(config),
        is_whole=True,
        extra_rows=int(has_grid),
        max_grid_tiles=_max_grid_tiles(config, side) if is_onevision else 0,
    )


def _encoder(config: ConfigReader) -> EncoderSpec:
    fields = part(config, "vision_config", {})
    usual = "siglip" if config.model_type == "llava_onevision" else "clip"
    kind = fields.value("model_type") or f"{usual}_vision_model"
    is_clip = kind == "clip_vision_model"
    if not is_clip and kind != "siglip_vision_model":
        raise UnsupportedModel(f"vision_config: {kind} is neither CLIP nor SigLIP")
    spec = siglip(part(config, "vision_config", _CLIP if is_clip else SIGLIP))
    layer, strategy = (
        config.value(f"vision_feature_{name}") for name in ("layer", "select_strategy")
    )
    if not isinstance(layer, int) or not -spec.num_layers <= layer < 0:
        raise UnsupportedModel(f"vision_feature_layer={layer!r} is not one of the last layers")
    if strategy != ("default" if is_clip else "full"):
        raise UnsupportedModel(
            f"vision_feature_select_strategy={strategy!r} is not supported for this encoder"
        )
    # The last layer is -1.
    count = spec.num_layers + 1 + layer
    return replace(spec, num_layers=count, has_class=is_clip, ends_with_norm=False)


def _max_grid_tiles(config: ConfigReader, side: int) -> int:
    """Tiles by the name of the way to place features, for tiles of `side` pixels."""
    name = config.value("vision_aspect_ratio")
    match = _ASPECTS.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise UnsupportedModel(f"vision_aspect_ratio={name!r} is not anyres_max_1 to anyres_max_99")
    size = part(config, "vision_config", SIGLIP).count("image_size")
    if size != side:
        raise UnsupportedModel(
            f"{PREPROCESSOR}: tiles of {side} pixels, and the encoder's are {size}"
        )
    return int(match[1])


def _most_tiles(config: ConfigReader, side: int) -> int:
    """Tiles of the largest grid."""
    usual = _GRIDS_OF_ONEVISION if config.model_type == "llava_onevision" else _PINPOINTS
    grids = config.value("image_grid_pinpoints") or usual
    most = 0
    for grid in grids if isinstance(grids, list) else [None]:
        sides = ConfigReader({"grid": grid}, {}).numbers("grid", 2) or (0, 0)
        if any(each % side or each < side for each in sides):
            raise UnsupportedModel(f"image_grid_pinpoints={grids!r} are not multiples of {side}")
        most = max(most, sides[0] // side * (sides[1] // side))
    if not 0 < most <= _MOST_TILES:
        raise UnsupportedModel(f"image_grid_pinpoints={grids!r} have {most} tiles")
    return most


class LlavaTower(Tower):
    """Projects each patch, and has the feature that ends a row of patches."""

    connector = "multi_modal_projector.linear_1.weight"

    def read_connector(self, reader: WeightReader) -> None:
        """Read the linears, and the end of rows."""
        hidden, size = self.spec.encoder.hidden_size, self.spec.text_size
        names = "multi_modal_projector.linear_{}.{}".format
        self._first = reader.matrix(self.connector, names(1, "bias"), size, hidden)
        self._second = reader.matrix(names(2, "weight"), names(2, "bias"), size, size)
        self._newline = reader.tensor("image_newline", size) if self.spec.extra_rows else None

    def connect(self, x: Tensor) -> Tensor:
        """[patches, hidden] to [patches, text_size]."""
        return self._second(activated(self._first(x), EncoderActivation.GELU))

    def extra(self) -> Tensor | None:
        """The end of a row of patches."""
        return None if self._newline is None else self._newline[None]
