"""What the files of Qwen 2 VL, 2.5 VL, 3 VL and 3.5 say of their encoders, whose images have any size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.config import ConfigReader, is_number
from millrace_shard.vision.spec import (
    CHANNELS,
    PREPROCESSOR,
    PROCESSOR,
    EncoderActivation,
    EncoderSpec,
    VisionSpec,
    part,
    pixels,
    text_size,
)

TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
FRAMES = 2
"""Equal frames of a still, over which the first product goes."""
PREFIX = "model.visual."
EPS = 1e-6
"""Of the encoder's norms, in the classes."""


class Names(NamedTuple):
    """Names of tensors that differ from class to class."""

    up: tuple[str, ...]
    down: str
    merger_norm: str
    merger: tuple[str, str]


OLDEST = Names(("mlp.fc1",), "mlp.fc2", "ln_q", ("mlp.0", "mlp.2"))
GATED = Names(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", "ln_q", ("mlp.0", "mlp.2"))
NEWEST = Names(("mlp.linear_fc1",), "mlp.linear_fc2", "norm", ("linear_fc1", "linear_fc2"))


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenSpec(VisionSpec):
    """What only these families have. `encoder.positions_per_side` is 0 where no positions are learned.

    Memory is counted by features: `rows_per_tile` is 1, and `max_tiles` the features of the largest image.
    """

    names: Names = OLDEST
    window: int = 0
    """Features of a side of a window; 0: patches see all others."""
    full_layers: tuple[int, ...] = ()
    """Layers whose patches see all others in spite of windows."""
    theta: float = 1e4
    patch_bias: bool = False
    deepstack: tuple[int, ...] = ()
    """Layers after which features are made that the first layers of the language model add."""

    @property
    def gated(self) -> bool:
        """Whether layers have RMSNorm and a gate, as in Qwen 2.5 VL; otherwise LayerNorm and none."""
        return self.names is GATED

    @property
    def rows_per_tile(self) -> int:
        return 1

    @property
    def row_size(self) -> int:
        """Numbers that are kept of a feature, and of those for the first layers of the language model."""
        return self.text_size * (1 + len(self.deepstack))

    def refusal(self, num_tiles: int, height: int, width: int) -> str | None:
        """Why the model does not read an image of this size; None if it does."""
        if num_tiles != 1 or height % self.cell or width % self.cell or not height * width:
            return (
                f"an image of {num_tiles} tiles of {width} x {height} pixels; one is read, with sides that are"
                f" multiples of {self.cell}"
            )
        if self.rows_of(height, width) > self.max_tiles:
            return f"an image of {width} x {height} pixels has more than {self.max_tiles} features"
        return None


def read(raw: Mapping[str, Any], raw_processor: Mapping[str, Any]) -> VisionSpec:
    """The spec by the objects of config.json and preprocessor_config.json. Raises UnsupportedModel."""
    config, processor = ConfigReader(raw, {}), ConfigReader(raw_processor, _PROCESSOR)
    defaults, read_own, image_token_id = _CLASSES[config.model_type]
    reader = part(config, "vision_config", {**_VISION, **defaults})
    # The classes take these names, too.
    aliases = {own: reader.value(name) for name, own in _ALIASES.items()}
    reader = reader.with_fields(**{own: value for own, value in aliases.items() if value})
    own = read_own(reader)
    encoder, merge = _encoder(reader, own), reader.count("spatial_merge_size")
    patch = encoder.patch_size
    sizes = ("patch_size", patch), ("merge_size", merge), ("temporal_patch_size", FRAMES)
    for name, value in sizes:
        if processor.count(name) != value:
            raise UnsupportedModel(
                f"{PREPROCESSOR}: {name}={processor.value(name)} is not the encoder's {value}"
            )
    # Older files have the text model's fields outside.
    size = config.count("hidden_size") if config.value("text_config") is None else text_size(config)
    if own.features != size:
        raise UnsupportedModel(
            f"vision_config: features of {own.features} numbers do not fit hidden_size={size}"
        )
    return QwenSpec(
        family=config.model_type,
        encoder=encoder,
        pixels=pixels(processor),
        tile_size=0,
        max_tiles=_most_features(processor, patch * merge),
        shuffle=merge,
        text_size=size,
        image_token_id=config.whole("image_token_id") or image_token_id,
        cell=patch * merge,
        has_axes=True,
        theta=_theta(reader),
        **own.more,
    )


class _Own(NamedTuple):
    """What the classes name in different ways."""

    hidden: int
    intermediate: int
    features: int
    """Numbers of a feature."""
    more: Mapping[str, Any] = MappingProxyType({})
    """Further fields of the spec."""
    positions_per_side: int = 0


def _oldest(reader: ConfigReader) -> _Own:
    """The encoder of Qwen 2 VL."""
    hidden, ratio = reader.count("embed_dim"), reader.number("mlp_ratio")
    return _Own(hidden, int(hidden * ratio), reader.count("hidden_size"))


def _gated(reader: ConfigReader) -> _Own:
    """The encoder of Qwen 2.5 VL."""
    full = reader.value("fullatt_block_indexes")
    if not isinstance(full, list | tuple) or not all(isinstance(each, int) for each in full):
        raise UnsupportedModel(f"vision_config: fullatt_block_indexes={full!r} must be a list")
    if reader.value("hidden_act") != "silu":
        raise UnsupportedModel("vision_config: hidden_act must be silu")
    cell = reader.count("spatial_merge_size") * reader.count("patch_size")
    if not (window := reader.count("window_size") // cell):
        raise UnsupportedModel("vision_config: window_size is less than a feature")
    return _Own(
        reader.count("hidden_size"),
        reader.count("intermediate_size"),
        reader.count("out_hidden_size"),
        {"names": GATED, "window": window, "full_layers": tuple(full)},
    )


def _newest(reader: ConfigReader) -> _Own:
    """The encoder of Qwen 3 VL and Qwen 3.5."""
    count, num_layers = reader.count("num_position_embeddings"), reader.count("depth")
    side, deepstack = math.isqrt(count), reader.value("deepstack_visual_indexes")
    if side * side != count:
        raise UnsupportedModel(f"vision_config: {count} num_position_embeddings are not a square")
    layers = list(deepstack) if isinstance(deepstack, list | tuple) else [None]
    if layers != [layer for layer in range(num_layers) if layer in layers]:
        raise UnsupportedModel(
            f"vision_config: deepstack_visual_indexes={deepstack!r} must be layers of {num_layers}, in order"
        )
    return _Own(
        reader.count("hidden_size"),
        reader.count("intermediate_size"),
        reader.count("out_hidden_size"),
        {"names": NEWEST, "patch_bias": True, "deepstack": tuple(layers)},
        positions_per_side=side,
    )


def _encoder(reader: ConfigReader, own: _Own) -> EncoderSpec:
    if reader.count("in_channels") != CHANNELS or reader.count("temporal_patch_size") != FRAMES:
        raise UnsupportedModel("vision_config: in_channels must be 3, and temporal_patch_size 2")
    heads, name = reader.count("num_heads"), reader.value("hidden_act")
    if own.hidden % (4 * heads):
        raise UnsupportedModel(
            f"vision_config: {heads} heads of a multiple of 4 channels do not divide {own.hidden}"
        )
    if name not in [each.value for each in EncoderActivation]:
        raise UnsupportedModel(f"vision_config: hidden_act={name!r} is not supported")
    return EncoderSpec(
        hidden_size=own.hidden,
        intermediate_size=own.intermediate,
        num_layers=reader.count("depth"),
        num_heads=heads,
        patch_size=reader.count("patch_size"),
        positions_per_side=own.positions_per_side,
        eps=EPS,
        activation=EncoderActivation(name),
    )


def _theta(reader: ConfigReader) -> float:
    rope = reader.value("rope_parameters") or {}
    theta = rope.get("rope_theta", 1e4) if isinstance(rope, dict) else None
    if not is_number(theta) or theta <= 1:
        raise UnsupportedModel(f"vision_config: rope_parameters={rope!r} are not supported")
    return float(theta)


def _most_features(settings: ConfigReader, cell: int) -> int:
    """Of an image as large as PREPROCESSOR allows, whose sides may be rounded up."""
    size = settings.value("size")
    fields = size if isinstance(size, dict) else {}
    bounds = []
    for older, newer in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        value = fields.get(newer) if settings.value(older) is None else settings.value(older)
        if not is_number(value) or value < 1:
            raise UnsupportedModel(f"{PREPROCESSOR}: {value!r} pixels are not a size")
        bounds.append(int(value))
    least, most = bounds
    long, short = (math.sqrt(least * ratio) / cell + 1 for ratio in (_RATIO, 1 / _RATIO))
    return max(
        most // cell**2,
        math.ceil(math.sqrt(_RATIO * most) / cell),
        math.ceil(least / cell**2 + long + short),
    )


_RATIO = 200
"""The largest ratio of the sides of an image."""
_ALIASES = {
    "in_chans": "in_channels",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "depth",
}
_VISION: Mapping[str, Any] = {
    "depth": 32,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "hidden_size": 3584,
}
_OLDEST: Mapping[str, Any] = {"embed_dim": 1280, "mlp_ratio": 4, "hidden_act": "quick_gelu"}
_GATED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": (7, 15, 23, 31),
}
"""Defaults of the encoders' configs in transformers."""
_NEWEST: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "patch_size": 16,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}
_CLASSES: Mapping[str, tuple[Mapping[str, Any], Callable[[ConfigReader], _Own], int]] = {
    "qwen2_vl": (_OLDEST, _oldest, 151_655),
    "qwen2_5_vl": (_GATED, _gated, 151_655),
    "qwen3_vl": (_NEWEST, _newest, 151_655),
    "qwen3_vl_moe": (_NEWEST, _newest, 151_655),
    "qwen3_5": (_NEWEST | {"deepstack_visual_indexes": ()}, _newest, 248_056),
    "qwen3_5_moe": (_NEWEST | {"deepstack_visual_indexes": ()}, _newest, 248_056),
}
"""Defaults of the encoder, how it is read, and the placeholder, for each `model_type`."""
_PROCESSOR: Mapping[str, Any] = {
    **PROCESSOR,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
}
"""Defaults of the processor in transformers."""
