"""InternVL: square tiles, whose encoder has a class token and scales what each half of a layer adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.base import Kernels
from millrace_shard.models.config import ConfigReader
from millrace_shard.vision.idefics3 import shuffled
from millrace_shard.vision.parts import Rotation, Split, SplitLayer, run_parts
from millrace_shard.vision.spec import (
    CHANNELS,
    LARGEST_SIDE,
    PREPROCESSOR,
    PROCESSOR,
    EncoderActivation,
    EncoderSpec,
    VisionSpec,
    part,
    pixels,
    text_size,
)
from millrace_shard.vision.tower import LayerNorm, WeightReader, activated, patches_of
from millrace_shard.weights.weights import Weights

ENCODER = "vision_tower"
PROJECTOR = "multi_modal_projector"
PROJECTOR_EPS = 1e-5
HEAD_EPS = 1e-6
"""Of norms of queries and keys, in the class."""
_MOST_TILES = 64
_CONFIG = {
    "image_token_id": 151667,
    "downsample_ratio": 0.5,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}
_ENCODER = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": CHANNELS,
    "image_size": 448,
    "patch_size": 14,
    "attention_bias": False,
    "use_qk_norm": False,
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu",
    "use_mean_pooling": True,
    "use_absolute_position_embeddings": True,
}
_PROCESSOR = {
    **PROCESSOR,
    "size": {"height": 384, "width": 384},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "max_patches": 12,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InternSpec(VisionSpec):
    """What only this family has."""

    has_bias: bool
    """Whether queries, keys and values have one."""
    norms_heads: bool
    """Whether queries and keys are normalised, over all heads."""
    is_rms: bool
    """Whether norms of layers lack a mean and a bias."""
    norms_output: bool
    """Whether a norm follows the last layer."""


def read(raw: Mapping[str, Any], raw_processor: Mapping[str, Any]) -> VisionSpec:
    """The spec by the objects of config.json and preprocessor_config.json. Raises UnsupportedModel."""
    config = ConfigReader(raw, _CONFIG)
    processor = ConfigReader(raw_processor, _PROCESSOR)
    config.check("vision_feature_layer", (-1,))
    config.check("vision_feature_select_strategy", ("default",))
    own = part(config, "vision_config", _ENCODER)
    own.check("use_absolute_position_embeddings", (True,))
    own.check("hidden_act", ("gelu",))
    config.check("projector_hidden_act", ("gelu",))
    own.check("norm_type", ("layer_norm", "rms_norm"))
    shuffle = round(1 / config.number("downsample_ratio"))
    if shuffle * config.number("downsample_ratio") != 1:
        raise UnsupportedModel("downsample_ratio must be 1 divided by a whole number")
    most = processor.count("max_patches")
    if most > _MOST_TILES:
        raise UnsupportedModel(
            f"{PREPROCESSOR}: max_patches={most}; at most {_MOST_TILES} are read"
        )
    return InternSpec(
        family=config.model_type,
        encoder=_encoder(own),
        pixels=pixels(processor),
        tile_size=_tile_size(processor, _side(own, "image_size")),
        max_tiles=most + (most > 1),
        shuffle=shuffle,
        text_size=text_size(config),
        image_token_id=config.whole("image_token_id"),
        has_bias=own.flag("attention_bias"),
        norms_heads=own.flag("use_qk_norm"),
        is_rms=own.value("norm_type") == "rms_norm",
        norms_output=not own.flag("use_mean_pooling"),
    )


def _encoder(config: ConfigReader) -> EncoderSpec:
    if config.count("num_channels") != CHANNELS:
        raise UnsupportedModel("vision_config: num_channels must be 3")
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if hidden % heads:
        raise UnsupportedModel(f"vision_config: {heads} heads do not divide hidden_size={hidden}")
    patch = _side(config, "patch_size")
    return EncoderSpec(
        hidden_size=hidden,
        intermediate_size=config.count("intermediate_size"),
        num_layers=config.count("num_hidden_layers"),
        num_heads=heads,
        patch_size=patch,
        positions_per_side=_side(config, "image_size") // patch,
        eps=config.number("layer_norm_eps"),
    )


def _side(config: ConfigReader, name: str) -> int:
    """A number of pixels, or two equal ones."""
    value = config.value(name)
    if not isinstance(value, list):
        return config.count(name)
    sides = config.numbers(name, 2)
    assert sides is not None
    if sides[0] != sides[1] or sides[0] < 1:
        raise UnsupportedModel(f"vision_config: {name}={value!r} must be a square")
    return sides[0]


def _tile_size(processor: ConfigReader, image_size: int) -> int:
    size = part(processor, "size", {})
    sides = size.count("height"), size.count("width")
    if sides != (image_size, image_size) or image_size > LARGEST_SIDE:
        raise UnsupportedModel(
            f"{PREPROCESSOR}: tiles of {sides[1]} x {sides[0]} pixels; the encoder has positions for"
            f" {image_size} x {image_size}"
        )
    return image_size


class InternTower:
    """Layers over a class token and all patches; squares of patches are joined, normalised and projected."""

    connector: ClassVar[str] = f"{PROJECTOR}.linear_1.weight"

    def __init__(self, spec: VisionSpec, weights: Weights, kernels: Kernels) -> None:
        assert isinstance(spec, InternSpec)
        encoder, reader = spec.encoder, WeightReader(weights, kernels)
        hidden, patch, embeddings = encoder.hidden_size, encoder.patch_size, f"{ENCODER}.embeddings"
        self._spec = spec
        self._dtype = weights.dtype
        projection = f"{embeddings}.patch_embeddings.projection"
        shape = hidden, CHANNELS, patch, patch
        self._patches = reader.matrix(f"{projection}.weight", f"{projection}.bias", *shape)
        self._class = reader.tensor(f"{embeddings}.cls_token", 1, 1, hidden).view(1, hidden)
        count = encoder.positions_per_side**2 + 1
        positions = reader.tensor(f"{embeddings}.position_embeddings", 1, count, hidden)
        self._positions = positions.view(count, hidden)
        self._layers = [
            _Layer(reader, f"{ENCODER}.encoder.layer.{index}.", spec, kernels)
            for index in range(encoder.num_layers)
        ]
        self._norm = None
        if spec.norms_output:
            self._norm = LayerNorm(reader, f"{ENCODER}.layernorm", hidden, encoder.eps)
        joined = hidden * spec.shuffle**2
        self._joined_norm = LayerNorm(reader, f"{PROJECTOR}.layer_norm", joined, PROJECTOR_EPS)
        self._project = [
            reader.linear(f"{PROJECTOR}.", (name,), spec.text_size, inputs)
            for name, inputs in (("linear_1", joined), ("linear_2", spec.text_size))
        ]
        self.digest = reader.digest

    def begin(self, pixels: Tensor) -> Split:
        """The first layer's input, [1 + patches, hidden], for a tile [3, size, size] float32."""
        cut = patches_of(pixels.to(self._dtype), self._spec.encoder.patch_size)
        return Split(torch.cat((self._class, self._patches(cut))) + self._positions)

    def run(self, tile: Split, parts: slice) -> Split:
        """Run some parts of layers."""
        return run_parts(self._layers, tile, parts)

    def end(self, tile: Split) -> Tensor:
        """Features [rows_per_tile, text_size] of the last layer's output."""
        normed = tile.x if self._norm is None else self._norm(tile.x)
        joined = self._joined_norm(shuffled(normed[1:], self._spec.shuffle))
        first, second = self._project
        return second(activated(first(joined), EncoderActivation.GELU))

    def extra(self) -> None:
        """An image has no further rows."""

    def __call__(self, pixels: Tensor) -> Tensor:
        """Features [rows_per_tile, text_size] of a tile [3, size, size] float32."""
        return self.end(self.run(self.begin(pixels), slice(None)))


class _Norm:
    """The norm before a half of a layer."""

    def __init__(self, reader: WeightReader, name: str, spec: InternSpec, kernels: Kernels) -> None:
        hidden, eps = spec.encoder.hidden_size, spec.encoder.eps
        self._kernels, self._eps = kernels, eps
        self._layer_norm = None if spec.is_rms else LayerNorm(reader, name, hidden, eps)
        self._weight = reader.tensor(f"{name}.weight", hidden) if spec.is_rms else None

    def __call__(self, x: Tensor) -> Tensor:
        """[n, hidden] to the same."""
        if self._layer_norm is not None:
            return self._layer_norm(x)
        assert self._weight is not None
        return self._kernels.rms_norm(x, self._weight, self._eps)


class _Layer(SplitLayer):
    """Attention of all to all, and a feed-forward half; what they add is scaled channel by channel."""

    def __init__(
        self, reader: WeightReader, prefix: str, spec: InternSpec, kernels: Kernels
    ) -> None:
        encoder = spec.encoder
        hidden, inter = encoder.hidden_size, encoder.intermediate_size
        super().__init__(kernels, hidden // encoder.num_heads)
        self._num_heads = encoder.num_heads
        self._before_attention = _Norm(reader, f"{prefix}layernorm_before", spec, kernels)
        names = tuple(f"attention.{name}_proj" for name in "qkv")
        self._qkv = reader.linear(prefix, names, hidden, hidden, bias=spec.has_bias)
        self._head_norms = [
            reader.tensor(f"{prefix}attention.{name}_norm.weight", hidden)
            for name in ("qk" if spec.norms_heads else "")
        ]
        self._out = reader.linear(prefix, ("attention.projection_layer",), hidden, hidden)
        self._before_mlp = _Norm(reader, f"{prefix}layernorm_after", spec, kernels)
        self._up = reader.linear(prefix, ("mlp.fc1",), inter, hidden)
        self._down = reader.linear(prefix, ("mlp.fc2",), hidden, inter)
        self._scales = [reader.tensor(f"{prefix}lambda_{half}", hidden) for half in (1, 2)]

    def project(self, x: Tensor, rotation: Rotation | None) -> Tensor:  # noqa: ARG002
        """Queries, keys and values [rows, 3, heads, head_dim], the first two after their norms if there are any."""
        queries, keys, values = self._qkv(self._before_attention(x)).chunk(3, dim=-1)
        if self._head_norms:
            queries, keys = (
                self._kernels.rms_norm(each.contiguous(), norm, HEAD_EPS)
                for each, norm in zip((queries, keys), self._head_norms, strict=True)
            )
        return torch.stack((queries, keys, values), 1).view(len(x), 3, self._num_heads, -1)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The output of some rows."""
        x = x + self._scales[0] * self._out(attended)
        up = activated(self._up(self._before_mlp(x)), EncoderActivation.GELU)
        return x + self._scales[1] * self._down(up)
