"""The encoders of images in mmproj files: fields of config.json and of the processor, and where tensors are.

Sources are llama.cpp's converters and its loader, tools/mtmd/clip.cpp. The file has nothing of the processor but
sizes, means and deviations; the rest is as in the family's published checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace_shard.errors import UnsupportedModel, WeightsError
from millrace_shard.weights.gguf.header import GgufHeader
from millrace_shard.weights.gguf.metadata import Metadata

Fields = dict[str, Any]
PREFIX = "clip.vision."
CHANNELS, FRAMES = 3, 2
FIRST_DOWN = "v.blk.0.ffn_down.weight"


class UnsupportedProjector(UnsupportedModel):
    """An encoder of which something is not known, or that is not for this text model."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Where the file has a tensor of transformers."""

    names: tuple[str, ...]
    """Of the parts, which follow each other along the first axis."""
    shape: tuple[int, ...]
    """Of the whole."""
    has_frames: bool = False
    """Whether the parts are the frames instead, the third axis."""
    is_plus_one: bool = False
    """Whether the file has the values plus 1."""
    num_heads: int = 0
    """Not 0: the rows of each head are in the order of interleaved rotary embeddings."""

    @property
    def part_shape(self) -> tuple[int, ...]:
        if self.has_frames:
            return (*self.shape[:2], *self.shape[3:])
        return (self.shape[0] // len(self.names), *self.shape[1:])


Tensors = dict[str, Stored]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """What the towers of a family read, by the names of transformers."""

    model_type: str
    text_size: int
    """Numbers of a feature."""
    vision: Fields
    """`vision_config`."""
    tensors: Tensors
    outer: Fields
    """Further fields of config.json."""
    processor: Fields
    """Sizes in preprocessor_config.json."""


class Clip:
    """The metadata and shapes of an mmproj file. Methods raise WeightsError, naming the key or the tensor."""

    def __init__(self, header: GgufHeader, metadata: Metadata) -> None:
        self.header = header
        self.metadata = metadata
        self.hidden = self.needed("embedding_length")
        self.num_layers = self.needed("block_count")
        self.num_heads = self.needed("attention.head_count")
        self.patch = self.needed("patch_size")
        if self.num_layers > len(header.tensors):
            # Lists of layers would take memory.
            raise WeightsError(
                f"{header.path.name} announces {self.num_layers} layers, and has {len(header.tensors)} tensors"
            )

    def __contains__(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    def needed(self, name: str) -> int:
        return self.metadata.needed(f"{PREFIX}{name}")

    def count(self, name: str, default: int) -> int:
        return self.metadata.count(f"{PREFIX}{name}") or default

    def shape(self, name: str, axes: int = 2) -> tuple[int, ...]:
        """The shape of a tensor that must have so many axes."""
        tensor = self.header.tensors.get(name)
        if tensor is None:
            raise WeightsError(f"tensor {name} is missing from {self.header.path.name}")
        if len(tensor.shape) != axes:
            raise WeightsError(
                f"tensor {name} in {self.header.path.name} has shape {list(tensor.shape)}, not {axes} axes"
            )
        return tensor.shape

    def activation(self, gelu: str = "gelu_pytorch_tanh") -> str:
        """The function in a layer, where `gelu` is the family's name of ggml's."""
        is_gelu, is_silu = (self.metadata.flag(f"clip.use_{name}") for name in ("gelu", "silu"))
        if is_gelu:
            return gelu
        return "silu" if is_silu else "quick_gelu"

    def inner(self) -> tuple[int, str, str]:
        """The width inside a layer's feed-forward half, and the file's names of its first and its last linear.

        The files of older converters have the two names the other way round.
        """
        rows, columns = self.shape(FIRST_DOWN)
        if columns == self.hidden != rows:
            return rows, "ffn_down", "ffn_up"
        return columns, "ffn_up", "ffn_down"

    def colours(self) -> Fields:
        """What preprocessor_config.json says of the values of pixels."""
        fields: Fields = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
        for name in ("image_mean", "image_std"):
            values = self.metadata.numbers(f"{PREFIX}{name}")
            if values is None or len(values) != CHANNELS:
                raise WeightsError(
                    f"{self.header.path.name}: {PREFIX}{name} must be {CHANNELS} numbers"
                )
            fields[name] = values
        return fields


def tensors_of(name: str, stored: str, *shape: int, bias: bool = True) -> Tensors:
    """A weight of this shape, and a bias for its first axis."""
    tensors = {f"{name}.weight": Stored((f"{stored}.weight",), shape)}
    if bias:
        tensors[f"{name}.bias"] = Stored((f"{stored}.bias",), shape[:1])
    return tensors


def layer_tensors(
    clip: Clip, prefix: str, modules: Mapping[str, tuple[str, tuple[int, ...]]], *, bias: bool
) -> Tensors:
    """The modules of all layers, whose names begin with `prefix`, by their names and shapes in the file."""
    tensors: Tensors = {}
    for layer in range(clip.num_layers):
        for name, (stored, shape) in modules.items():
            ours, theirs = f"{prefix}{layer}.{name}", f"v.blk.{layer}.{stored}"
            tensors |= tensors_of(ours, theirs, *shape, bias=bias)
    return tensors


def clip_layers(clip: Clip, prefix: str) -> Tensors:
    """The layers of CLIP and SigLIP, whose names begin with `prefix`."""
    hidden, (inner, up, down) = clip.hidden, clip.inner()
    square = hidden, hidden
    modules = {
        "layer_norm1": ("ln1", (hidden,)),
        "layer_norm2": ("ln2", (hidden,)),
        "self_attn.q_proj": ("attn_q", square),
        "self_attn.k_proj": ("attn_k", square),
        "self_attn.v_proj": ("attn_v", square),
        "self_attn.out_proj": ("attn_out", square),
        "mlp.fc1": (up, (inner, hidden)),
        "mlp.fc2": (down, (hidden, inner)),
    }
    return layer_tensors(clip, prefix, modules, bias=True)


def _siglip(clip: Clip, module: str) -> tuple[Fields, Tensors]:
    """`vision_config` and tensors of SigLIP's encoder, which is the module `module`."""
    hidden, patch, image = clip.hidden, clip.patch, clip.needed("image_size")
    embeddings, side = f"{module}.embeddings", image // patch
    tensors = {
        **tensors_of(
            f"{embeddings}.patch_embedding", "v.patch_embd", hidden, CHANNELS, patch, patch
        ),
        **tensors_of(
            f"{embeddings}.position_embedding", "v.position_embd", side * side, hidden, bias=False
        ),
        **clip_layers(clip, f"{module}.encoder.layers."),
        **tensors_of(f"{module}.post_layernorm", "v.post_ln", hidden),
    }
    vision = {
        "hidden_size": hidden,
        "intermediate_size": clip.inner()[0],
        "num_hidden_layers": clip.num_layers,
        "num_attention_heads": clip.num_heads,
        "image_size": image,
        "patch_size": patch,
        "layer_norm_eps": clip.metadata.number(f"{PREFIX}attention.layer_norm_epsilon") or 1e-6,
        "hidden_act": clip.activation(),
    }
    return vision, tensors


def gemma3(clip: Clip) -> Encoder:
    vision, tensors = _siglip(clip, "vision_tower.vision_model")
    image, factor = vision["image_size"], clip.count("projector.scale_factor", 4)
    projection = "mm.input_projection.weight"
    text_size = clip.shape(projection)[1]
    norm = Stored(("mm.soft_emb_norm.weight",), (clip.hidden,), is_plus_one=True)
    tensors["multi_modal_projector.mm_soft_emb_norm.weight"] = norm
    name = "multi_modal_projector.mm_input_projection_weight"
    tensors[name] = Stored((projection,), (clip.hidden, text_size))
    return Encoder(
        model_type="gemma3",
        text_size=text_size,
        vision={"model_type": "siglip_vision_model", **vision},
        tensors=tensors,
        outer={"mm_tokens_per_image": (image // clip.patch // factor) ** 2},
        processor={"size": {"height": image, "width": image}},
    )


def idefics3(clip: Clip) -> Encoder:
    vision, tensors = _siglip(clip, "model.vision_model")
    tile, factor = vision["image_size"], clip.count("projector.scale_factor", 2)
    projection = "mm.model.fc"
    text_size = clip.shape(f"{projection}.weight")[0]
    name = "model.connector.modality_projection.proj"
    tensors |= tensors_of(name, projection, text_size, clip.hidden * factor**2, bias=False)
    return Encoder(
        model_type="idefics3",
        text_size=text_size,
        vision=vision,
        tensors=tensors,
        outer={"scale_factor": factor},
        processor={
            "size": {"longest_edge": clip.count("preproc_image_size", 4 * tile)},
            "max_image_size": {"longest_edge": tile},
        },
    )


SPLIT_QKV = ("attn_q", "attn_k", "attn_v")
QWEN = "model.visual."
PIXELS = (56 * 56, 12_845_056)
NEWER_PIXELS = (65_536, 16_777_216)
"""The least and the largest number of an image by the processors of published checkpoints."""


def _qwen(
    clip: Clip, pixels: tuple[int, int], *, norm_bias: bool
) -> tuple[Fields, Tensors, Fields]:
    """What the encoders of all versions have: fields of `vision_config`, tensors, and sizes of the processor."""
    hidden, patch, merge = clip.hidden, clip.patch, clip.count("spatial_merge_size", 2)
    frames = ("v.patch_embd.weight", "v.patch_embd.weight.1")
    shape = (hidden, CHANNELS, FRAMES, patch, patch)
    vision = {
        "depth": clip.num_layers,
        "num_heads": clip.num_heads,
        "patch_size": patch,
        "spatial_merge_size": merge,
        "hidden_act": clip.activation(),
    }
    tensors = {
        f"{QWEN}patch_embed.proj.weight": Stored(frames, shape, has_frames=True),
        **layer_tensors(
            clip,
            f"{QWEN}blocks.",
            {"norm1": ("ln1", (hidden,)), "norm2": ("ln2", (hidden,))},
            bias=norm_bias,
        ),
        **layer_tensors(
            clip, f"{QWEN}blocks.", {"attn.proj": ("attn_out", (hidden, hidden))}, bias=True
        ),
    }
    least, most = (
        clip.count(f"image_{name}_pixels", default)
        for name, default in zip(("min", "max"), pixels, strict=True)
    )
    processor = {
        "patch_size": patch,
        "merge_size": merge,
        "temporal_patch_size": FRAMES,
        "size": {"shortest_edge": least, "longest_edge": most},
    }
    return vision, tensors, processor


def _joined_qkv(clip: Clip) -> Tensors:
    """Linears of all layers that the file has in three."""
    tensors, hidden = {}, clip.hidden
    for layer in range(clip.num_layers):
        for kind, shape in (("weight", (3 * hidden, hidden)), ("bias", (3 * hidden,))):
            names = tuple(f"v.blk.{layer}.{name}.{kind}" for name in SPLIT_QKV)
            tensors[f"{QWEN}blocks.{layer}.attn.qkv.{kind}"] = Stored(names, shape)
    return tensors


def _merger(clip: Clip, names: tuple[str, str, str], *, norm_bias: bool) -> tuple[int, Tensors]:
    """The numbers of a feature, and the tensors of what makes features of squares of patches."""
    wide = clip.hidden * clip.count("spatial_merge_size", 2) ** 2
    text_size = clip.shape("mm.2.weight")[0]
    norm, first, last = (f"{QWEN}merger.{name}" for name in names)
    return text_size, {
        **tensors_of(norm, "v.post_ln", clip.hidden, bias=norm_bias),
        **tensors_of(first, "mm.0", wide, wide),
        **tensors_of(last, "mm.2", text_size, wide),
    }


OLDER_MERGER = ("ln_q", "mlp.0", "mlp.2")


def qwen2(clip: Clip) -> Encoder:
    vision, tensors, processor = _qwen(clip, PIXELS, norm_bias=True)
    text_size, merger = _merger(clip, OLDER_MERGER, norm_bias=True)
    (inner, up, down), hidden = clip.inner(), clip.hidden
    modules = {"mlp.fc1": (up, (inner, hidden)), "mlp.fc2": (down, (hidden, inner))}
    tensors |= (
        _joined_qkv(clip) | merger | layer_tensors(clip, f"{QWEN}blocks.", modules, bias=True)
    )
    return Encoder(
        model_type="qwen2_vl",
        text_size=text_size,
        vision={
            **vision,
            "embed_dim": hidden,
            "hidden_size": text_size,
            # Rounded up, since the width is the product without its fraction.
            "mlp_ratio": math.nextafter(inner / hidden, math.inf),
        },
        tensors=tensors,
        outer={},
        processor=processor,
    )


WINDOW = 112
"""Pixels of a side of Qwen 2.5 VL's windows."""


def qwen2_5(clip: Clip) -> Encoder:
    vision, tensors, processor = _qwen(clip, PIXELS, norm_bias=False)
    text_size, merger = _merger(clip, OLDER_MERGER, norm_bias=False)
    (inner, up, down), hidden = clip.inner(), clip.hidden
    modules = {
        "mlp.gate_proj": ("ffn_gate", (inner, hidden)),
        "mlp.up_proj": (up, (inner, hidden)),
        "mlp.down_proj": (down, (hidden, inner)),
    }
    tensors |= (
        _joined_qkv(clip) | merger | layer_tensors(clip, f"{QWEN}blocks.", modules, bias=True)
    )
    period = clip.needed("n_wa_pattern")
    own = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "out_hidden_size": text_size,
        "window_size": clip.count("window_size", WINDOW),
        "fullatt_block_indexes": list(range(period - 1, clip.num_layers, period)),
    }
    return Encoder(
        model_type="qwen2_5_vl",
        text_size=text_size,
        vision=vision | own,
        tensors=tensors,
        outer={},
        processor=processor,
    )


def qwen3(clip: Clip) -> Encoder:
    vision, tensors, processor = _qwen(clip, NEWER_PIXELS, norm_bias=True)
    text_size, merger = _merger(clip, ("norm", "linear_fc1", "linear_fc2"), norm_bias=True)
    (inner, up, down), hidden = clip.inner(), clip.hidden
    modules = {
        "attn.qkv": ("attn_qkv", (3 * hidden, hidden)),
        "mlp.linear_fc1": (up, (inner, hidden)),
        "mlp.linear_fc2": (down, (hidden, inner)),
    }
    tensors |= merger | layer_tensors(clip, f"{QWEN}blocks.", modules, bias=True)
    tensors[f"{QWEN}patch_embed.proj.bias"] = Stored(("v.patch_embd.bias",), (hidden,))
    positions = clip.shape("v.position_embd.weight")[0]
    tensors |= tensors_of(f"{QWEN}pos_embed", "v.position_embd", positions, hidden, bias=False)
    key = f"{PREFIX}is_deepstack_layers"
    flags = clip.metadata.flags(key) or [False] * clip.num_layers
    if len(flags) != clip.num_layers:
        raise WeightsError(f"{clip.metadata.describe(key)} must have a flag for each layer")
    deepstack = [layer for layer, is_one in enumerate(flags) if is_one]
    wide = hidden * vision["spatial_merge_size"] ** 2
    for index, layer in enumerate(deepstack):
        ours, theirs = f"{QWEN}deepstack_merger_list.{index}.", f"v.deepstack.{layer}."
        tensors |= tensors_of(f"{ours}norm", f"{theirs}norm", wide)
        tensors |= tensors_of(f"{ours}linear_fc1", f"{theirs}fc1", wide, wide)
        tensors |= tensors_of(f"{ours}linear_fc2", f"{theirs}fc2", text_size, wide)
    own = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "out_hidden_size": text_size,
        "num_position_embeddings": positions,
        "deepstack_visual_indexes": deepstack,
    }
    return Encoder(
        model_type="qwen3_vl",
        text_size=text_size,
        vision=vision | own,
        tensors=tensors,
        outer={},
        processor=processor,
    )


def pixtral(clip: Clip) -> Encoder:
    """Pixtral, and Mistral 3 if squares of patches are joined."""
    hidden, image = clip.hidden, clip.needed("image_size")
    inner, text_size = clip.inner()[0], clip.shape("mm.2.weight")[0]
    merge, has_bias = clip.count("spatial_merge_size", 1), "mm.1.bias" in clip
    tensors = {
        **_pixtral_layers(clip),
        **tensors_of(f"{PIXTRAL}1", "mm.1", text_size, hidden, bias=has_bias),
        **tensors_of(f"{PIXTRAL}2", "mm.2", text_size, text_size, bias=has_bias),
    }
    if MERGER in clip:
        projector, wide = "multi_modal_projector.", hidden * merge**2
        tensors |= tensors_of(f"{projector}norm", "mm.input_norm", hidden, bias=False)
        merging = f"{projector}patch_merger.merging_layer.weight"
        tensors[merging] = Stored((MERGER,), (hidden, wide))
    return Encoder(
        model_type="mistral3" if MERGER in clip else "llava",
        text_size=text_size,
        vision={
            "model_type": "pixtral",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": clip.num_layers,
            "num_attention_heads": clip.num_heads,
            "image_size": image,
            "patch_size": clip.patch,
            "hidden_act": clip.activation(gelu="gelu"),
            "rope_theta": clip.metadata.number("clip.rope.freq_base") or 1e4,
        },
        tensors=tensors,
        outer={
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "spatial_merge_size": merge,
            "multimodal_projector_bias": has_bias,
        },
        processor={"size": {"longest_edge": image}, "patch_size": clip.patch},
    )


PIXTRAL = "multi_modal_projector.linear_"
MERGER = "mm.patch_merger.weight"


def _pixtral_layers(clip: Clip) -> Tensors:
    hidden, (inner, up, down) = clip.hidden, clip.inner()
    square = hidden, hidden
    modules = {
        "attention_norm": ("ln1", (hidden,)),
        "ffn_norm": ("ln2", (hidden,)),
        "attention.v_proj": ("attn_v", square),
        "attention.o_proj": ("attn_out", square),
        "feed_forward.gate_proj": ("ffn_gate", (inner, hidden)),
        "feed_forward.up_proj": (up, (inner, hidden)),
        "feed_forward.down_proj": (down, (hidden, inner)),
    }
    layers, conv = "vision_tower.transformer.layers.", (hidden, CHANNELS, clip.patch, clip.patch)
    rotated = {
        f"{layers}{layer}.attention.{kind}_proj.weight": Stored(
            (f"v.blk.{layer}.attn_{kind}.weight",), square, num_heads=clip.num_heads
        )
        for layer in range(clip.num_layers)
        for kind in "qk"
    }
    return {
        **tensors_of("vision_tower.patch_conv", "v.patch_embd", *conv, bias=False),
        **tensors_of("vision_tower.ln_pre", "v.pre_ln", hidden, bias=False),
        **layer_tensors(clip, layers, modules, bias=False),
        **rotated,
    }
