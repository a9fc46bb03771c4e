"""Tiny random checkpoints that read images, their prompts, and what transformers computes for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from millrace_shard.batch.sequence_images import Mask
from millrace_shard.vision.registry import read_vision
from millrace_shard.vision.spec import VisionSpec
from millrace_testing.models.models import CONFIGS, VOCAB

IMAGE_TOKEN = VOCAB - 1
PROCESSOR = {
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}
_VISION = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 24,
    "patch_size": 4,
}
"""36 patches, of which 9 features are made."""

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Kind:
    """What a family's checkpoint has of its own."""

    text: str
    """The type of the language model."""
    more: Mapping[str, Any]
    vision: Mapping[str, Any]
    sizes: Callable[[int], Mapping[str, Any]]
    """Fields of the processor for tiles of so many pixels a side."""
    image_token: str = "image_token_id"
    model_type: str | None = None
    """Of config.json, where it is not the family's name."""

    @property
    def has_tiles(self) -> bool:
        """Whether an image may have several tiles, which the model reads as one more axis."""
        return "max_image_size" in self.sizes(1)


def _tiles(edge: int) -> dict[str, Any]:
    return {"max_image_size": {"longest_edge": edge}}


def _square(edge: int) -> dict[str, Any]:
    return {"size": {"height": edge, "width": edge}}


def _cropped(edge: int) -> dict[str, Any]:
    return {"size": {"shortest_edge": edge}, "crop_size": {"height": edge, "width": edge}}


def _longest(edge: int) -> dict[str, Any]:
    return {"size": {"longest_edge": edge}}


GRIDS = [[24, 48], [48, 24], [48, 48]]
"""Of tiles of LLaVA-NeXT and LLaVA-OneVision, in pixels."""
_CLIP = {"model_type": "clip_vision_model", "patch_size": 8, "num_hidden_layers": 3}
_OUTPUT = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
_PIXTRAL = {"model_type": "pixtral"}
_IDEFICS = Kind("llama", {"scale_factor": 2}, {}, _tiles)
_SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False}
KINDS = {
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "gemma3": Kind(
        "gemma3_text", {"mm_tokens_per_image": 9}, _SIGLIP, _square, image_token="image_token_index"
    ),
    "llava": Kind("llama", {}, _CLIP, _cropped, image_token="image_token_index"),
    "llava_next": Kind(
        "llama",
        {"image_grid_pinpoints": GRIDS},
        _CLIP,
        _cropped,
        image_token="image_token_index",
    ),
    # Its patches leave out pixels of each tile, as those of published models do.
    "llava_onevision": Kind(
        "qwen2",
        {"image_grid_pinpoints": GRIDS, "vision_aspect_ratio": "anyres_max_2"},
        _SIGLIP | {"patch_size": 7},
        _square,
        image_token="image_token_index",
    ),
    "paligemma": Kind(
        "gemma",
        {"projection_dim": 64},
        _SIGLIP | {"patch_size": 8},
        _square,
        image_token="image_token_index",
    ),
    "internvl": Kind("qwen2", {}, {"model_type": "internvl_vision"}, _square),
    "pixtral": Kind(
        "mistral",
        _OUTPUT,
        _PIXTRAL | {"patch_size": 8, "hidden_act": "silu"},
        _longest,
        image_token="image_token_index",
        model_type="llava",
    ),
    "mistral3": Kind(
        "mistral",
        {"vision_feature_layer": -1},
        _PIXTRAL,
        _longest,
        image_token="image_token_index",
    ),
}
"""By `VisionSpec.family`."""


def save_tiny_vision(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    tile: int = 24,
    text: Mapping[str, Any] | None = None,
    image_token_id: int = IMAGE_TOKEN,
    **vision: Any,
) -> PreTrainedModel:
    """Write a random checkpoint that reads images of tiles with `tile` pixels a side, and return the model.

    No parameter has its initial value, so that one left out shows. `text` are fields of the language model's config.
    """
    kind = KINDS[family]
    config = AutoConfig.for_model(
        kind.model_type or family,
        text_config={"model_type": kind.text, **CONFIGS[kind.text], **(text or {})},
        vision_config={**_VISION, **kind.vision, **vision},
        **{kind.image_token: image_token_id},
        **kind.more,
        tie_word_embeddings=False,
    )
    model = _written(folder, config, seed=seed)
    sizes = kind.sizes(tile)
    (folder / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, **sizes}))
    return model


def _written(folder: Path, config: PretrainedConfig, *, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * 0.15)
            else:
                parameter.add_(noise * 0.1)
    model.save_pretrained(folder)
    evaluated: PreTrainedModel = model.eval()
    return evaluated


def picture(num_tiles: int, *, seed: int, size: int = 24, width: int | None = None) -> Pixels:
    """Random pixels [num_tiles, 3, size, width], of squares without a width."""
    shape = num_tiles, 3, size, width or size
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def reference_inputs(spec: VisionSpec, pictures: Sequence[Pixels]) -> dict[str, Tensor]:
    """What transformers' model reads of pictures, in float32."""
    if not spec.cell:
        values = normalised(spec, np.concatenate(pictures))
        return {"pixel_values": values[None] if KINDS[spec.family].has_tiles else values}
    tiles = [tile for pixels in pictures for tile in pixels]
    sizes = [tile.shape[1:] for tile in tiles]
    values = torch.zeros(len(tiles), 3, *map(max, zip(*sizes, strict=True)))
    for each, tile, (height, width) in zip(values, tiles, sizes, strict=True):
        each[:, :height, :width] = normalised(spec, tile)
    return {"pixel_values": values, "image_sizes": torch.tensor(sizes)}


def reference_features(model: PreTrainedModel, spec: VisionSpec, tiles: Pixels) -> Tensor:
    """transformers' features of tiles, [rows, hidden]."""
    with torch.no_grad():
        out = model.get_image_features(**reference_inputs(spec, [tiles]), return_dict=True)
    features: Tensor = out.pooler_output
    return (torch.cat(list(features)) if features[0].ndim > 1 else features).flatten(0, -2)


def normalised(spec: VisionSpec, pixels: Pixels) -> Tensor:
    """What transformers' model reads, in float32."""
    mean = torch.tensor(spec.pixels.mean).view(3, 1, 1)
    std = torch.tensor(spec.pixels.std).view(3, 1, 1)
    return (torch.from_numpy(pixels).float() / 255 - mean) / std


@dataclass(frozen=True)
class Prompt:
    """Text with pictures; each tile's placeholders are a span of its own, with a token between two tiles."""

    ids: list[int]
    spans: list[tuple[int, int, int]]
    """Position, tokens, and the first row if the rows of all tiles follow each other from 0 on."""
    pictures: list[Pixels]
    grids: list[tuple[int, int, int]] = field(default_factory=list)
    """Position, rows and columns of the features of each picture, if pictures have any size."""

    def logits(self, model: PreTrainedModel, spec: VisionSpec) -> Tensor:
        """transformers' logits at all positions, [tokens, vocab]."""
        if self.grids:
            return self._logits_of_grids(model)
        inputs, ids = reference_inputs(spec, self.pictures), torch.tensor([self.ids])
        kinds = (ids == IMAGE_TOKEN).long() if spec.mask is Mask.IMAGE else torch.zeros_like(ids)
        more = {} if spec.mask is Mask.CAUSAL else {"token_type_ids": kinds}
        with torch.no_grad():
            out = model(input_ids=ids, **inputs, **more)
        logits: Tensor = out.logits[0]
        return logits

    def _logits_of_grids(self, model: PreTrainedModel) -> Tensor:
        inputs = of_processor(model.config.vision_config.patch_size, self.pictures)
        ids = torch.tensor([self.ids])
        with torch.no_grad():
            out = model(input_ids=ids, mm_token_type_ids=(ids == IMAGE_TOKEN).int(), **inputs)
        logits: Tensor = out.logits[0]
        return logits


def of_processor(patch_size: int, pictures: Sequence[Pixels]) -> dict[str, Tensor]:
    """What transformers' processor for PIL makes of pictures [1, 3, height, width] that fit its patches."""
    processor = Qwen2VLImageProcessorPil(
        do_resize=False,
        patch_size=patch_size,
        image_mean=PROCESSOR["image_mean"],
        image_std=PROCESSOR["image_std"],
    )
    images = [Image.fromarray(each[0].transpose(1, 2, 0)) for each in pictures]
    return dict(processor.preprocess(images, return_tensors="pt"))


QWEN_CELL = 8
"""Pixels of a side of what becomes a feature."""
_QWEN_NEWEST: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "out_hidden_size": 64,
    "num_position_embeddings": 25,
}
_QWEN_VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 48, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 48,
        "intermediate_size": 72,
        "out_hidden_size": 64,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": _QWEN_NEWEST | {"deepstack_visual_indexes": [0, 2]},
    "qwen3_vl_moe": _QWEN_NEWEST | {"deepstack_visual_indexes": [1]},
    "qwen3_5": _QWEN_NEWEST,
    "qwen3_5_moe": _QWEN_NEWEST,
}
_QWEN_TEXT = {"qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}
"""Types whose configs are those of a text model of a type with other fields."""


def save_tiny_qwen(
    folder: Path,
    model_type: str,
    *,
    text: Mapping[str, Any] | None = None,
    image_token_id: int = IMAGE_TOKEN,
    **vision: Any,
) -> PreTrainedModel:
    """Write a random checkpoint that reads images of any size, and return the model; as `save_tiny_vision`."""
    name = _QWEN_TEXT.get(model_type, f"{model_type}_text")
    sections = {"rope_theta": 1e4, "mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0}
    of_text = {**CONFIGS.get(name, CONFIGS["llama"]), "rope_parameters": sections}
    sizes = {"depth": 3, "num_heads": 3, "patch_size": QWEN_CELL // 2}
    config = AutoConfig.for_model(
        model_type,
        text_config={"model_type": f"{model_type}_text", **of_text, **(text or {})},
        vision_config=sizes | _QWEN_VISION[model_type] | vision,
        image_token_id=image_token_id,
        tie_word_embeddings=False,
    )
    model = _written(folder, config, seed=0)
    processor = PROCESSOR | {"patch_size": QWEN_CELL // 2, "size": QWEN_SIZE}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


QWEN_SIZE = {"shortest_edge": 256, "longest_edge": 4096}


def prompt_of_sizes(sizes: Sequence[tuple[int, int]], *, seed: int = 0) -> Prompt:
    """Text before, between and after pictures, whose sizes are rows and columns of features."""
    generator = torch.Generator().manual_seed(seed)

    def text(count: int) -> list[int]:
        return torch.randint(3, IMAGE_TOKEN, (count,), generator=generator).tolist()

    ids, row = text(5), 0
    prompt = Prompt(ids, [], [])
    for number, (rows, columns) in enumerate(sizes):
        tall, wide = rows * QWEN_CELL, columns * QWEN_CELL
        draw = np.random.default_rng(100 * seed + number)
        prompt.pictures.append(draw.integers(0, 256, (1, 3, tall, wide), dtype=np.uint8))
        prompt.spans.append((len(ids), rows * columns, row))
        prompt.grids.append((len(ids), rows, columns))
        ids += [IMAGE_TOKEN] * (rows * columns) + text(3)
        row += rows * columns
    return prompt


def prompt_with(
    pictures: Sequence[Pixels], rows_per_tile: int | Sequence[int], *, seed: int = 0
) -> Prompt:
    """Text before, between and after the pictures; all have one number of rows for a tile, or each its own."""
    counts = [rows_per_tile] * len(pictures) if isinstance(rows_per_tile, int) else rows_per_tile
    generator = torch.Generator().manual_seed(seed)

    def text(count: int) -> list[int]:
        return torch.randint(3, IMAGE_TOKEN, (count,), generator=generator).tolist()

    ids, spans, row = text(5), list[tuple[int, int, int]](), 0
    for pixels, count in zip(pictures, counts, strict=True):
        for _ in pixels:
            spans.append((len(ids), count, row))
            ids, row = ids + [IMAGE_TOKEN] * count + text(1), row + count
        ids += text(3)
    return Prompt(ids, spans, list(pictures))


def spec_of(folder: Path) -> VisionSpec:
    """The spec of a checkpoint that reads images."""
    spec = read_vision(folder)
    assert spec is not None
    return spec
