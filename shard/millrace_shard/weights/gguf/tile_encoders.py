"""The encoders of square tiles with a class token, InternVL's and LLaVA's; as `encoders.py`."""

from __future__ import annotations

from millrace_shard.errors import WeightsError
from millrace_shard.weights.gguf.encoders import (
    CHANNELS,
    PREFIX,
    Clip,
    Encoder,
    Fields,
    Stored,
    Tensors,
    UnsupportedProjector,
    clip_layers,
    layer_tensors,
    tensors_of,
)

TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"
CLASS = "v.class_embd"
NEWLINES = ("v.image_newline", "model.image_newline")
"""Names of converters, the older one last."""


def internvl(clip: Clip) -> Encoder:
    _need_class(clip)
    activation = clip.activation(gelu="gelu")
    if activation != "gelu":
        raise UnsupportedProjector(
            f"{clip.header.path.name} has an encoder with {activation}, not with gelu"
        )
    hidden, patch, image = clip.hidden, clip.patch, clip.needed("image_size")
    shuffle = clip.count("projector.scale_factor", 2)
    projector, joined = "mm.model.mlp", hidden * shuffle**2
    text_size = clip.shape(f"{projector}.3.weight")[0]
    embeddings, count = f"{TOWER}.embeddings", (image // patch) ** 2 + 1
    conv = hidden, CHANNELS, patch, patch
    tensors = {
        **tensors_of(f"{embeddings}.patch_embeddings.projection", "v.patch_embd", *conv),
        f"{embeddings}.cls_token": Stored((CLASS,), (1, 1, hidden)),
        f"{embeddings}.position_embeddings": Stored(
            ("v.position_embd.weight",), (1, count, hidden)
        ),
        **_intern_layers(clip),
        **tensors_of(f"{PROJECTOR}.layer_norm", f"{projector}.0", joined),
        **tensors_of(f"{PROJECTOR}.linear_1", f"{projector}.1", text_size, joined),
        **tensors_of(f"{PROJECTOR}.linear_2", f"{projector}.3", text_size, text_size),
    }
    sides = {"height": image, "width": image}
    tiles = {
        f"{name}_patches": clip.count(f"preproc_{name}_tiles", default)
        for name, default in (("min", 1), ("max", 12))
    }
    return Encoder(
        model_type="internvl",
        text_size=text_size,
        vision={
            **_sizes(clip),
            "model_type": "internvl_vision",
            "attention_bias": "v.blk.0.attn_q.bias" in clip,
            "use_qk_norm": "v.blk.0.attn_q_norm.weight" in clip,
            "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in clip else "rms_norm",
            "hidden_act": activation,
        },
        tensors=tensors,
        outer={"downsample_ratio": 1 / shuffle},
        processor={"size": sides, **tiles},
    )


def _sizes(clip: Clip) -> Fields:
    epsilon = clip.metadata.number(f"{PREFIX}attention.layer_norm_epsilon")
    if epsilon is None:
        raise WeightsError(f"{clip.header.path.name} has no {PREFIX}attention.layer_norm_epsilon")
    return {
        "hidden_size": clip.hidden,
        "intermediate_size": clip.inner()[0],
        "num_hidden_layers": clip.num_layers,
        "num_attention_heads": clip.num_heads,
        "image_size": clip.needed("image_size"),
        "patch_size": clip.patch,
        "layer_norm_eps": epsilon,
    }


def _intern_layers(clip: Clip) -> Tensors:
    hidden, (inner, up, down) = clip.hidden, clip.inner()
    layers, square = f"{TOWER}.encoder.layer.", (hidden, hidden)
    norms = {"layernorm_before": ("ln1", (hidden,)), "layernorm_after": ("ln2", (hidden,))}
    inputs = {f"attention.{kind}_proj": (f"attn_{kind}", square) for kind in "qkv"}
    others = {
        "attention.projection_layer": ("attn_out", square),
        "mlp.fc1": (up, (inner, hidden)),
        "mlp.fc2": (down, (hidden, inner)),
    }
    tensors = {
        **layer_tensors(clip, layers, norms, bias="v.blk.0.ln1.bias" in clip),
        **layer_tensors(clip, layers, inputs, bias="v.blk.0.attn_q.bias" in clip),
        **layer_tensors(clip, layers, others, bias=True),
    }
    if "v.blk.0.attn_q_norm.weight" in clip:
        heads = {f"attention.{kind}_norm": (f"attn_{kind}_norm", (hidden,)) for kind in "qk"}
        tensors |= layer_tensors(clip, layers, heads, bias=False)
    for layer in range(clip.num_layers):
        for half in (1, 2):
            stored = (f"v.blk.{layer}.ls{half}.weight",)
            tensors[f"{layers}{layer}.lambda_{half}"] = Stored(stored, (hidden,))
    return tensors


def llava(clip: Clip) -> Encoder:
    """LLaVA 1.5, and LLaVA-NeXT if there is an end of rows. Files have only the layers that run."""
    _need_class(clip)
    hidden, patch, image = clip.hidden, clip.patch, clip.needed("image_size")
    text_size, embeddings = clip.shape("mm.2.weight")[0], f"{TOWER}.embeddings"
    count, conv = (image // patch) ** 2 + 1, (hidden, CHANNELS, patch, patch)
    tensors = {
        **tensors_of(f"{embeddings}.patch_embedding", "v.patch_embd", *conv, bias=False),
        f"{embeddings}.class_embedding": Stored((CLASS,), (hidden,)),
        **tensors_of(
            f"{embeddings}.position_embedding", "v.position_embd", count, hidden, bias=False
        ),
        **tensors_of(f"{TOWER}.pre_layrnorm", "v.pre_ln", hidden),
        **clip_layers(clip, f"{TOWER}.encoder.layers."),
        **tensors_of(f"{PROJECTOR}.linear_1", "mm.0", text_size, hidden),
        **tensors_of(f"{PROJECTOR}.linear_2", "mm.2", text_size, text_size),
    }
    has_grids, more = _has_grids(clip), dict[str, list[list[int]]]()
    if has_grids:
        newline = next((name for name in NEWLINES if name in clip), NEWLINES[-1])
        tensors["image_newline"] = Stored((newline,), (text_size,))
        more = {"image_grid_pinpoints": _grids(clip)}
    return Encoder(
        model_type="llava_next" if has_grids else "llava",
        text_size=text_size,
        vision={
            "model_type": "clip_vision_model",
            **_sizes(clip),
            "hidden_act": clip.activation(gelu="gelu"),
        },
        tensors=tensors,
        outer={
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
            **more,
        },
        processor={
            "size": {"shortest_edge": image},
            "crop_size": {"height": image, "width": image},
            **more,
        },
    )


def _need_class(clip: Clip) -> None:
    """Raise UnsupportedProjector for an encoder without a class token, such as SigLIP."""
    if CLASS not in clip:
        name = clip.header.path.name
        raise UnsupportedProjector(f"{name} has an encoder without a class token ({CLASS})")


def _has_grids(clip: Clip) -> bool:
    """Whether an image becomes a grid of tiles, too. Raises UnsupportedProjector for other layers than the last."""
    key = f"{PREFIX}feature_layer"
    layers = clip.metadata.counts(key)
    if layers not in (None, [clip.num_layers]):
        raise UnsupportedProjector(f"{clip.metadata.describe(key)} is not supported")
    for name in ("image_aspect_ratio", "mm_projector_type"):
        # They describe the same in words.
        clip.metadata.text(f"{PREFIX}{name}")
    for name in ("image_crop_resolution", "image_split_resolution"):
        # LLaVA 1.6 has them of another encoder than its own; the sides of a tile are its `image_size`.
        clip.count(name, 1)
    return clip.metadata.text(f"{PREFIX}mm_patch_merge_type") == "spatial_unpad"


def _grids(clip: Clip) -> list[list[int]]:
    """Heights and widths of grids in pixels."""
    key = f"{PREFIX}image_grid_pinpoints"
    sides = clip.metadata.counts(key)
    if not sides or len(sides) % 2:
        raise WeightsError(f"{clip.header.path.name}: {key} must be pairs of numbers")
    return [sides[index : index + 2] for index in range(0, len(sides), 2)]
