"""Pixtral and Mistral 3: images of any size, patches whose positions rotate queries and keys by row and column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.base import Kernels, Linear
from millrace_shard.models.config import ConfigReader
from millrace_shard.vision.parts import Rotation, Split, SplitLayer, rotated, run_parts
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
    token_id,
)
from millrace_shard.vision.tower import WeightReader, activated, patches_of
from millrace_shard.weights.weights import Weights

ENCODER = "vision_tower"
PROJECTOR = "multi_modal_projector"
EPS = 1e-5
"""Of the encoder's norms, in the class."""
_LLAVA = {
    "image_token_index": 32000,
    "multimodal_projector_bias": True,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 1,
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}
_MISTRAL3 = _LLAVA | {
    "image_token_index": 10,
    "multimodal_projector_bias": False,
    "spatial_merge_size": 2,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
_ENCODER = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": CHANNELS,
    "patch_size": 16,
    "hidden_act": "gelu",
    "rope_theta": 10_000.0,
}
_ENCODER_OF_MISTRAL3 = _ENCODER | {"patch_size": 14}
_PROCESSOR = {
    **PROCESSOR,
    "size": {"longest_edge": 1024},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralSpec(VisionSpec):
    """What only these families have. A side of an image has up to `encoder.positions_per_side` patches."""

    gates: EncoderActivation | None
    """None: SiLU."""
    rope_theta: float
    projector_bias: bool
    merges: bool
    """Whether a norm with `merge_eps` and a linear join squares of patches before the projector."""
    merge_eps: float


def read(raw: Mapping[str, Any], raw_processor: Mapping[str, Any]) -> VisionSpec:
    """The spec by the objects of config.json and preprocessor_config.json. Raises UnsupportedModel."""
    merges = raw.get("model_type") == "mistral3"
    config = ConfigReader(raw, _MISTRAL3 if merges else _LLAVA)
    processor = ConfigReader(raw_processor, _PROCESSOR)
    config.check("vision_feature_layer", (-1,))
    config.check("vision_feature_select_strategy", ("full",))
    config.check("projector_hidden_act", ("gelu",))
    own = part(config, "vision_config", _ENCODER_OF_MISTRAL3 if merges else _ENCODER)
    merge = config.count("spatial_merge_size")
    encoder = _encoder(own, _longest_edge(processor), merge)
    return PixtralSpec(
        family="mistral3" if merges else "pixtral",
        encoder=encoder,
        pixels=pixels(processor),
        tile_size=encoder.positions_per_side * encoder.patch_size,
        max_tiles=1,
        shuffle=merge,
        text_size=text_size(config),
        image_token_id=token_id(config),
        cell=encoder.patch_size * merge,
        gates=_gates(own),
        rope_theta=_theta(own),
        projector_bias=config.flag("multimodal_projector_bias"),
        merges=merges,
        merge_eps=part(config, "text_config", {"rms_norm_eps": EPS}).number("rms_norm_eps"),
    )


def _encoder(config: ConfigReader, longest: int, merge: int) -> EncoderSpec:
    if config.count("num_channels") != CHANNELS:
        raise UnsupportedModel("vision_config: num_channels must be 3")
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if hidden % (4 * heads):
        raise UnsupportedModel(
            f"vision_config: hidden_size={hidden} must be a multiple of four times {heads} heads"
        )
    patch = config.count("patch_size")
    return EncoderSpec(
        hidden_size=hidden,
        intermediate_size=config.count("intermediate_size"),
        num_layers=config.count("num_hidden_layers"),
        num_heads=heads,
        patch_size=patch,
        positions_per_side=-(-longest // (patch * merge)) * merge,
        eps=EPS,
    )


def _longest_edge(processor: ConfigReader) -> int:
    size = processor.value("size")
    sides = [each for each in size.values() if each] if isinstance(size, dict) else []
    if not sides or not all(type(side) is int and 0 < side <= LARGEST_SIDE for side in sides):
        raise UnsupportedModel(
            f"{PREPROCESSOR}: size={size!r} must have sides of 1 to {LARGEST_SIDE} pixels"
        )
    return int(max(sides))


def _theta(config: ConfigReader) -> float:
    rope = config.value("rope_parameters")
    if rope is None:
        return config.number("rope_theta")
    fields = ConfigReader(rope if isinstance(rope, dict) else {}, {"rope_theta": 10_000.0})
    fields.check("rope_type", ("axial", "default"))
    return fields.number("rope_theta")


def _gates(config: ConfigReader) -> EncoderActivation | None:
    kinds = EncoderActivation.GELU, EncoderActivation.GELU_TANH
    config.check("hidden_act", ("silu", *(each.value for each in kinds)))
    name = config.value("hidden_act")
    return None if name == "silu" else EncoderActivation(name)


class _State(NamedTuple):
    """An image before or inside a layer."""

    split: Split
    grid: tuple[int, int]
    """Rows and columns of patches."""


class PixtralTower:
    """Gated layers without biases; for Mistral 3 a norm and a linear join squares of patches before the projector."""

    connector: ClassVar[str] = f"{PROJECTOR}.linear_1.weight"

    def __init__(self, spec: VisionSpec, weights: Weights, kernels: Kernels) -> None:
        assert isinstance(spec, PixtralSpec)
        encoder, reader = spec.encoder, WeightReader(weights, kernels)
        hidden, patch = encoder.hidden_size, encoder.patch_size
        self._spec = spec
        self._dtype = weights.dtype
        self._kernels = kernels
        self._patches = reader.matrix(
            f"{ENCODER}.patch_conv.weight", None, hidden, CHANNELS, patch, patch
        )
        self._norm = reader.tensor(f"{ENCODER}.ln_pre.weight", hidden)
        self._layers = [
            _Layer(reader, f"{ENCODER}.transformer.layers.{index}.", spec, kernels)
            for index in range(encoder.num_layers)
        ]
        self._angles = _angles(spec).to(self._norm.device)
        self._merge: Linear | None = None
        if spec.merges:
            self._merge_norm = reader.tensor(f"{PROJECTOR}.norm.weight", hidden)
            inputs = hidden * spec.shuffle**2
            name = f"{PROJECTOR}.patch_merger.merging_layer.weight"
            self._merge = reader.matrix(name, None, hidden, inputs)
        bias, outputs = spec.projector_bias, spec.text_size
        self._project = [
            reader.linear(f"{PROJECTOR}.", (name,), outputs, inputs, bias=bias)
            for name, inputs in (("linear_1", hidden), ("linear_2", outputs))
        ]
        self.digest = reader.digest

    def begin(self, pixels: Tensor) -> _State:
        """The first layer's input for an image [3, height, width] float32."""
        patch = self._spec.encoder.patch_size
        cut = patches_of(pixels.to(self._dtype), patch)
        grid = pixels.shape[1] // patch, pixels.shape[2] // patch
        x = self._kernels.rms_norm(self._patches(cut), self._norm, EPS)
        return _State(Split(x, self._rotation(*grid)), grid)

    def run(self, image: _State, parts: slice) -> _State:
        """Run some parts of layers."""
        return image._replace(split=run_parts(self._layers, image.split, parts))

    def end(self, image: _State) -> Tensor:
        """Features [rows, text_size] of the last layer's output."""
        hidden = image.split.x
        if self._merge is not None:
            hidden = self._kernels.rms_norm(hidden, self._merge_norm, self._spec.merge_eps)
            hidden = self._merge(_squares(hidden, image.grid, self._spec.shuffle))
        first, second = self._project
        return second(activated(first(hidden), EncoderActivation.GELU))

    def extra(self) -> None:
        """An image has no further rows."""

    def __call__(self, pixels: Tensor) -> Tensor:
        """Features [rows, text_size] of an image [3, height, width] float32."""
        return self.end(self.run(self.begin(pixels), slice(None)))

    def _rotation(self, rows: int, columns: int) -> Rotation:
        """Cosines and sines [rows * columns, 1, head_dim / 2] float32: for rows, then for columns."""
        cosines, sines = (
            torch.cat(
                (
                    table[:rows, None, 0].expand(-1, columns, -1),
                    table[None, :columns, 1].expand(rows, -1, -1),
                ),
                dim=-1,
            ).reshape(rows * columns, 1, -1)
            for table in self._angles
        )
        return cosines, sines


class _Layer(SplitLayer):
    """Attention of all patches to all patches, and a gated feed-forward half, each after a norm."""

    def __init__(
        self, reader: WeightReader, prefix: str, spec: PixtralSpec, kernels: Kernels
    ) -> None:
        encoder = spec.encoder
        hidden, inter = encoder.hidden_size, encoder.intermediate_size
        plain = partial(reader.linear, prefix, bias=False)
        super().__init__(kernels, hidden // encoder.num_heads)
        self._num_heads = encoder.num_heads
        self._gates = spec.gates
        self._before_attention = reader.tensor(f"{prefix}attention_norm.weight", hidden)
        self._qkv = plain(tuple(f"attention.{name}_proj" for name in "qkv"), hidden, hidden)
        self._out = plain(("attention.o_proj",), hidden, hidden)
        self._before_mlp = reader.tensor(f"{prefix}ffn_norm.weight", hidden)
        gates = "feed_forward.gate_proj", "feed_forward.up_proj"
        self._gate_up = plain(gates, inter, hidden)
        self._down = plain(("feed_forward.down_proj",), hidden, inter)

    def project(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """Rotated queries and keys, and values, [rows, 3, heads, head_dim]."""
        assert rotation is not None
        normed = self._kernels.rms_norm(x, self._before_attention, EPS)
        queries, keys, values = self._qkv(normed).view(x.shape[0], 3, self._num_heads, -1).unbind(1)
        return torch.stack((rotated(queries, rotation), rotated(keys, rotation), values), 1)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The output of some rows."""
        x = x + self._out(attended)
        gate_up = self._gate_up(self._kernels.rms_norm(x, self._before_mlp, EPS))
        return x + self._down(self._gated(gate_up))

    def _gated(self, gate_up: Tensor) -> Tensor:
        if self._gates is None:
            return self._kernels.silu_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return activated(gate, self._gates) * up


def _angles(spec: PixtralSpec) -> Tensor:
    """[2, positions, 2, head_dim / 4] float32: cosines and sines of each position, as a row and as a column."""
    dim = spec.encoder.hidden_size // spec.encoder.num_heads
    frequencies = 1.0 / (spec.rope_theta ** (torch.arange(0, dim, 2).float() / dim))
    positions = torch.arange(spec.encoder.positions_per_side).float()
    by_axis = torch.stack((frequencies[0::2], frequencies[1::2]))
    angles = positions[:, None, None] * by_axis
    return torch.stack((angles.cos(), angles.sin()))


def _squares(x: Tensor, grid: tuple[int, int], factor: int) -> Tensor:
    """Join squares of patches [n, hidden] of a grid, channel by channel: [n / factor², hidden * factor²]."""
    rows, columns = grid[0] // factor, grid[1] // factor
    cells = x.view(rows, factor, columns, factor, -1).permute(0, 2, 4, 1, 3)
    return cells.reshape(rows * columns, -1)
