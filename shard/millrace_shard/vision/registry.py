"""The families whose images are read: what reads their files, and their encoders."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from millrace_shard.batch.sequence_images import Mask
from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.base import Kernels
from millrace_shard.vision import (
    gemma3,
    idefics3,
    internvl,
    llava,
    paligemma,
    pixtral,
    qwen_vl,
    qwen_vl_spec,
)
from millrace_shard.vision.spec import PREPROCESSOR, PROCESSORS, VisionSpec
from millrace_shard.weights.json_object import read_json_object
from millrace_shard.weights.weights import Weights

logger = logging.getLogger(__name__)


class AnyTower(Protocol):
    """An encoder and its connector."""

    connector: ClassVar[str]
    """A tensor of the connector, which files with only the text model lack."""
    digest: bytes
    """See `WeightReader.digest`."""

    def __init__(self, spec: Any, weights: Weights, kernels: Kernels) -> None:  # noqa: ANN401
        """Read the weights. Raises WeightsError."""

    def begin(self, pixels: Tensor) -> Any:  # noqa: ANN401
        """The first layer's input for a tile [3, height, width] float32."""

    def run(self, x: Any, layers: slice, /) -> Any:  # noqa: ANN401
        """Run some layers over the result of the layers before."""

    def end(self, x: Any, /) -> Tensor:  # noqa: ANN401
        """Features [rows, row_size] of the last layer's result."""

    def extra(self) -> Tensor | None:
        """The features [extra_rows, text_size] that each image has behind its tiles' rows, if it has any."""

    def __call__(self, pixels: Tensor) -> Tensor:
        """Features [rows, row_size] of a tile."""


class VisionFamily(NamedTuple):
    """A page of a family."""

    read: Callable[[Mapping[str, Any], Mapping[str, Any]], VisionSpec]
    """Of the objects of config.json and preprocessor_config.json."""
    tower: type[AnyTower]
    mask: Mask = Mask.CAUSAL
    """PROMPT: the family's text model is not causal, so that it is none without the encoder."""


FAMILIES: Mapping[str, VisionFamily] = {
    "idefics3": VisionFamily(idefics3.read, idefics3.IdeficsTower),
    "smolvlm": VisionFamily(idefics3.read, idefics3.IdeficsTower),
    "gemma3": VisionFamily(gemma3.read, gemma3.GemmaTower),
    "llava": VisionFamily(llava.read, llava.LlavaTower),
    "llava_next": VisionFamily(llava.read, llava.LlavaTower),
    "llava_onevision": VisionFamily(llava.read, llava.LlavaTower),
    "paligemma": VisionFamily(paligemma.read, paligemma.PaliGemmaTower, Mask.PROMPT),
    "internvl": VisionFamily(internvl.read, internvl.InternTower),
    "pixtral": VisionFamily(pixtral.read, pixtral.PixtralTower),
    "mistral3": VisionFamily(pixtral.read, pixtral.PixtralTower),
    **dict.fromkeys(qwen_vl_spec.TYPES, VisionFamily(qwen_vl_spec.read, qwen_vl.QwenTower)),
}
"""By `VisionSpec.family`."""


def read_vision(folder: Path) -> VisionSpec | None:
    """The spec by the files of `folder`; None for a model that reads no images, or without PREPROCESSOR.

    Raises ModelError for fields that are wrong.
    """
    raw = read_json_object(folder / "config.json") or {}
    family = FAMILIES.get(_name(raw))
    if family is None:
        return None
    processor = _processor(folder)
    if processor is None and family.mask is Mask.PROMPT:
        raise UnsupportedModel(f"{folder} lacks {PREPROCESSOR}, which {raw['model_type']} needs")
    if processor is None:
        logger.warning("images are refused, since %s lacks %s", folder, PREPROCESSOR)
        return None
    return family.read(raw, processor)


def _processor(folder: Path) -> Mapping[str, Any] | None:
    """What newer checkpoints have in place of PREPROCESSOR, or that; None without either.

    Fields that are null are left out, as the classes in transformers have their defaults for both.
    """
    processor = (read_json_object(folder / PROCESSORS) or {}).get("image_processor")
    if not isinstance(processor, dict):
        processor = read_json_object(folder / PREPROCESSOR)
    if processor is None:
        return None
    return {name: value for name, value in processor.items() if value is not None}


def _name(raw: Mapping[str, Any]) -> str:
    """The family by config.json: its `model_type`, or the encoder's where families share a class."""
    encoder, name = raw.get("vision_config"), str(raw.get("model_type"))
    kind = encoder.get("model_type") if isinstance(encoder, dict) else None
    return "pixtral" if (name, kind) == ("llava", "pixtral") else name
