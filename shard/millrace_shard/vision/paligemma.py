"""PaliGemma: one square of an image, each of whose patches becomes a feature; all tokens of a prompt see each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from millrace_shard.batch.sequence_images import Mask
from millrace_shard.models.config import ConfigReader
from millrace_shard.vision.spec import (
    PROCESSOR,
    SIGLIP,
    VisionSpec,
    check_window,
    part,
    pixels,
    siglip,
    square,
    text_size,
    token_id,
)
from millrace_shard.vision.tower import Tower, WeightReader

_SIZE = {"size": {"height": 224, "width": 224}}


def read(raw: Mapping[str, Any], raw_processor: Mapping[str, Any]) -> VisionSpec:
    """The spec by the objects of config.json and preprocessor_config.json. Raises UnsupportedModel."""
    config = ConfigReader(raw, {"image_token_index": 256_000})
    processor = ConfigReader(raw_processor, {**PROCESSOR, **_SIZE})
    spec = VisionSpec(
        family=config.model_type,
        encoder=siglip(part(config, "vision_config", SIGLIP)),
        pixels=pixels(processor),
        tile_size=square(processor),
        max_tiles=1,
        shuffle=1,
        text_size=text_size(config),
        image_token_id=token_id(config),
        mask=Mask.PROMPT,
        is_whole=True,
    )
    # With a text of one token.
    check_window(config, spec.rows_per_tile + 1)
    return spec


class PaliGemmaTower(Tower):
    """Projects each patch."""

    connector = "multi_modal_projector.linear.weight"

    def read_connector(self, reader: WeightReader) -> None:
        """Read the projection."""
        bias = "multi_modal_projector.linear.bias"
        hidden = self.spec.encoder.hidden_size
        self._project = reader.matrix(self.connector, bias, self.spec.text_size, hidden)

    def connect(self, x: Tensor) -> Tensor:
        """[patches, hidden] to [patches, text_size]."""
        return self._project(x)
