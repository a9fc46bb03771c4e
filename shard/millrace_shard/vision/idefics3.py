"""Idefics 3 and SmolVLM: square tiles, whose patches are joined in squares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.config import ConfigReader
from millrace_shard.vision.spec import (
    LARGEST_SIDE,
    PREPROCESSOR,
    PROCESSOR,
    SIGLIP,
    VisionSpec,
    part,
    pixels,
    siglip,
    text_size,
)
from millrace_shard.vision.tower import Tower, WeightReader

_ENCODER = {**SIGLIP, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
_TILE = {"max_image_size": {"longest_edge": 364}}


def read(raw: Mapping[str, Any], raw_processor: Mapping[str, Any]) -> VisionSpec:
    """The spec by the objects of config.json and preprocessor_config.json. Raises UnsupportedModel."""
    config = ConfigReader(raw, {"scale_factor": 2})
    processor = ConfigReader(raw_processor, {**PROCESSOR, **_TILE})
    tile = _tile_size(processor)
    return VisionSpec(
        family=config.model_type,
        encoder=siglip(part(config, "vision_config", _ENCODER)),
        pixels=pixels(processor),
        tile_size=tile,
        max_tiles=(-(-LARGEST_SIDE // tile)) ** 2 + 1,
        shuffle=config.count("scale_factor"),
        text_size=text_size(config),
        image_token_id=config.whole("image_token_id"),
    )


def _tile_size(processor: ConfigReader) -> int:
    size = part(processor, "max_image_size", {}).count("longest_edge")
    if size > LARGEST_SIDE:
        raise UnsupportedModel(f"{PREPROCESSOR}: tiles of {size} pixels are not supported")
    return size


class IdeficsTower(Tower):
    """Joins squares of patches, and projects these."""

    modules = ("model.vision_model",)
    connector = "model.connector.modality_projection.proj.weight"

    def read_connector(self, reader: WeightReader) -> None:
        """Read the projection."""
        inputs = self.spec.encoder.hidden_size * self.spec.shuffle**2
        self._project = reader.matrix(self.connector, None, self.spec.text_size, inputs)

    def connect(self, x: Tensor) -> Tensor:
        """[patches, hidden] to [rows_per_tile, text_size]."""
        return self._project(shuffled(x, self.spec.shuffle))


def shuffled(x: Tensor, factor: int) -> Tensor:
    """Join squares of `factor` * `factor` patches of `x` [n, hidden]: [n / factor², hidden * factor²]."""
    side = round(x.shape[0] ** 0.5)
    cells = x.view(side // factor, factor, side // factor, factor, -1)
    return cells.transpose(1, 2).reshape((side // factor) ** 2, -1)
