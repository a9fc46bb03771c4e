"""Gemma 3: a square of an image, and with pan and scan one of each part. Patches are averaged in squares; the tokens of
a square of an image see each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

from millrace_shard.batch.sequence_images import Mask
from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.layer_weights import LinearWeights, NormWeights
from millrace_shard.kernels.stored_weight import StoredWeight
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

_CONFIG = {"mm_tokens_per_image": 256, "image_token_index": 262_144}
_SIZES = {"pan_and_scan_max_num_crops": 4, "size": {"height": 224, "width": 224}}


def read(raw: Mapping[str, Any], raw_processor: Mapping[str, Any]) -> VisionSpec:
    """The spec by the objects of config.json and preprocessor_config.json. Raises UnsupportedModel."""
    config = ConfigReader(raw, _CONFIG)
    processor = ConfigReader(raw_processor, {**PROCESSOR, **_SIZES})
    encoder, side = siglip(part(config, "vision_config", SIGLIP)), square(processor)
    patches, count = side // encoder.patch_size, config.count("mm_tokens_per_image")
    features = math.isqrt(count)
    if features**2 != count or patches % features:
        raise UnsupportedModel(
            f"mm_tokens_per_image={count} does not fit {patches} patches a side of an image"
        )
    check_window(config, count)
    crops = 0
    if processor.flag("do_pan_and_scan"):
        crops = processor.count("pan_and_scan_max_num_crops")
    return VisionSpec(
        family=config.model_type,
        encoder=encoder,
        pixels=pixels(processor),
        tile_size=side,
        max_tiles=1 + crops,
        shuffle=patches // features,
        text_size=text_size(config),
        image_token_id=token_id(config),
        mask=Mask.IMAGE,
        is_whole=True,
    )


class GemmaTower(Tower):
    """Averages squares of patches, normalises the averages, and projects them."""

    connector = "multi_modal_projector.mm_input_projection_weight"

    def read_connector(self, reader: WeightReader) -> None:
        """Read the norm and the projection, which the file has transposed."""
        hidden = self.spec.encoder.hidden_size
        norm = reader.tensor("multi_modal_projector.mm_soft_emb_norm.weight", hidden)
        self._norm_of_means = NormWeights(
            weight=norm, eps=self.spec.encoder.eps, plus_one=True, wide=True
        )
        weight = reader.tensor(self.connector, hidden, self.spec.text_size)
        self._project = reader.linear_from(
            LinearWeights(StoredWeight.of(weight.T.contiguous()), None)
        )

    def connect(self, x: Tensor) -> Tensor:
        """[patches, hidden] to [rows_per_tile, text_size]."""
        factor, side = self.spec.shuffle, self.spec.patches_per_side
        cells = x.float().view(side // factor, factor, side // factor, factor, -1)
        # In one order, whatever the number of threads.
        total = torch.zeros_like(cells[:, 0, :, 0])
        for row, column in product(range(factor), repeat=2):
            total += cells[:, row, :, column]
        means = (total / factor**2).flatten(0, 1).to(x.dtype)
        return self._project(self._norm_of_means.apply(means))
