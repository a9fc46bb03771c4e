"""Tiny checkpoints that read images as a text model and an mmproj file, by the rules of llama.cpp's converters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as BlockType
from safetensors.numpy import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedModel

from millrace_testing.models.gguf_files import CONTROL, NORMAL, TinyGguf, add_value, rotated_rows
from millrace_testing.models.models import VOCAB
from millrace_testing.models.vision_models import (
    GRIDS,
    PROCESSOR,
    QWEN_SIZE,
    save_tiny_qwen,
    save_tiny_vision,
)

Array = npt.NDArray[Any]
TEXT = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SECTIONS = [2, 3, 3]
QWEN_TEXT = {"head_dim": 16, "rope_parameters": {"rope_theta": 1e4, "mrope_section": SECTIONS}}
HYBRID = {
    "head_dim": 64,
    "num_hidden_layers": 4,
    "rope_parameters": {
        "rope_theta": 1e4,
        "mrope_section": SECTIONS,
        "partial_rotary_factor": 0.25,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


@dataclass(frozen=True)
class Kind:
    """A family, by the fields that differ."""

    projector: str
    placeholder: str
    text: str
    """The family of the text model."""
    arch: str | None = None
    """Of the text model, where it is not that of its family."""
    of_text: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What the converter of the encoder adds."""
    vision: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the encoder other than those of the other tests."""

    @property
    def is_qwen(self) -> bool:
        return self.projector.startswith("qwen")


_GELU, _SILU = {"clip.use_gelu": True}, {"clip.use_silu": True}
_PIXELS = {
    "clip.vision.image_min_pixels": QWEN_SIZE["shortest_edge"],
    "clip.vision.image_max_pixels": QWEN_SIZE["longest_edge"],
    "clip.vision.spatial_merge_size": 2,
}
_FACTOR = {"clip.vision.projector.scale_factor": 2}
_LLAVA = {
    "clip.has_llava_projector": True,
    "clip.use_gelu": False,
    "clip.vision.block_count": 2,
    "clip.vision.feature_layer": [2],
}
_PAD = "<|image_pad|>"
_FLAT = _PIXELS | _GELU | {"clip.vision.is_deepstack_layers": [False] * 3}
KINDS = {
    "gemma3": Kind("gemma3", "<image_soft_token>", "gemma3_text", metadata=_GELU | _FACTOR),
    "idefics3": Kind(
        "idefics3",
        "<image>",
        "llama",
        metadata={**_GELU, **_FACTOR, "clip.vision.preproc_image_size": 96},
    ),
    "pixtral": Kind("pixtral", "[IMG]", "llama", metadata=_SILU),
    "internvl": Kind(
        "internvl",
        "<IMG_CONTEXT>",
        "qwen2",
        metadata={**_GELU, **_FACTOR, "clip.vision.preproc_max_tiles": 6},
    ),
    "llava": Kind("mlp", "<image>", "llama", metadata=_LLAVA),
    "llava_next": Kind(
        "mlp",
        "<image>",
        "llama",
        metadata={
            **_LLAVA,
            "clip.vision.mm_patch_merge_type": "spatial_unpad",
            # Published files have these of another encoder.
            "clip.vision.image_crop_resolution": 16,
            "clip.vision.image_split_resolution": 16,
            "clip.vision.image_grid_pinpoints": [side for grid in GRIDS for side in grid],
        },
    ),
    "mistral3": Kind(
        "pixtral",
        "[IMG]",
        "llama",
        arch="mistral3",
        metadata=_GELU | {"clip.vision.spatial_merge_size": 2},
    ),
    "qwen2_vl": Kind(
        "qwen2vl_merger", _PAD, "qwen2", arch="qwen2vl", of_text=QWEN_TEXT, metadata=_PIXELS
    ),
    "qwen2_5_vl": Kind(
        "qwen2.5vl_merger",
        _PAD,
        "qwen2",
        arch="qwen2vl",
        of_text=QWEN_TEXT,
        metadata=_PIXELS | _SILU | {"clip.vision.n_wa_pattern": 2},
        vision={"window_size": 112},
    ),
    "qwen3_vl": Kind(
        "qwen3vl_merger",
        _PAD,
        "qwen3",
        arch="qwen3vl",
        of_text=QWEN_TEXT,
        metadata=_PIXELS | _GELU | {"clip.vision.is_deepstack_layers": [True, False, True]},
    ),
    "qwen3_vl_moe": Kind(
        "qwen3vl_merger",
        _PAD,
        "qwen3_moe",
        arch="qwen3vlmoe",
        of_text=QWEN_TEXT | {"moe_intermediate_size": 48},
        metadata=_PIXELS | _GELU | {"clip.vision.is_deepstack_layers": [False, True, False]},
    ),
    "qwen3_5": Kind(
        "qwen3vl_merger", _PAD, "qwen3_5_text", arch="qwen35", of_text=HYBRID, metadata=_FLAT
    ),
    "qwen3_5_moe": Kind(
        "qwen3vl_merger",
        _PAD,
        "qwen3_5_moe_text",
        arch="qwen35moe",
        of_text=HYBRID | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 32},
        metadata=_FLAT,
    ),
}
"""By the family of the checkpoint."""


@dataclass
class TinyPair:
    """A checkpoint with random weights in `folder`, and the two GGUF files of it, which `write` writes."""

    family: str
    folder: Path
    kind: str = "F32"
    """The block type of the encoder's matrices."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Of the encoder; None removes a key."""
    tokens: dict[str, Any] | None = None
    """The tokenizer's metadata; None: one whose last token is the placeholder."""
    vision: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the encoder."""
    of_text: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the text model."""

    def __post_init__(self) -> None:
        own = KINDS[self.family]
        fields = {key: value for key, value in own.of_text.items() if key != "rope_parameters"}
        self.text = TinyGguf(own.text, **{**TEXT, **fields, **self.of_text})
        tokens = self.tokens or _tokens(own.placeholder)
        self.text.metadata |= tokens
        text = self.text.config.to_dict() | dict(own.of_text)
        if own.is_qwen:
            text.pop("model_type")
        save = save_tiny_qwen if own.is_qwen else save_tiny_vision
        self.model: PreTrainedModel = save(
            self.folder,
            self.family,
            text=text,
            image_token_id=tokens["tokenizer.ggml.tokens"].index(own.placeholder),
            **{**own.vision, **self.vision},
        )
        _copy_text(self.text.model, self.model)
        self.model.save_pretrained(self.folder)
        if own.arch is not None:
            self._rename(own.arch)
        self.metadata = self._metadata() | self.metadata
        self.tensors = dict(self._tensors())
        """Of the encoder, by the names in the file."""

    def write(self, path: Path) -> tuple[Path, Path]:
        """Write the text model to `path`, and the encoder beside it."""
        self.text.write(path)
        beside = path.with_name(f"mmproj-{path.name}")
        self.write_encoder(beside)
        return path, beside

    def write_encoder(self, path: Path) -> None:
        writer = gguf.GGUFWriter(path, self.metadata.get("general.architecture", "clip"))
        for key, value in self.metadata.items():
            if value is not None and key != "general.architecture":
                add_value(writer, key, value)
        for name, data in self.tensors.items():
            is_matrix = data.ndim == 2 and "position" not in name
            kind = BlockType[self.kind if is_matrix else "F32"]
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def _rename(self, arch: str) -> None:
        """Give the text model the architecture `arch`, and its positions several axes."""
        text, former = self.text, f"{self.text.arch}."
        text.metadata = {
            key.replace(former, f"{arch}.", 1) if key.startswith(former) else key: value
            for key, value in text.metadata.items()
        }
        text.arch = arch
        if KINDS[self.family].is_qwen:
            text.metadata[f"{arch}.rope.dimension_sections"] = [*SECTIONS, 0]

    def _metadata(self) -> dict[str, Any]:
        """As `MmprojModel.set_gguf_parameters`."""
        own, vision = KINDS[self.family], self.model.config.vision_config
        layers, heads = (
            getattr(vision, names[0], None) or getattr(vision, names[1])
            for names in (("num_hidden_layers", "depth"), ("num_attention_heads", "num_heads"))
        )
        return {
            "clip.has_vision_encoder": True,
            "clip.projector_type": own.projector,
            "clip.vision.projection_dim": 64,
            "clip.vision.image_size": 560 if own.is_qwen else self._image_size(),
            "clip.vision.patch_size": _side(vision.patch_size),
            "clip.vision.embedding_length": getattr(vision, "embed_dim", vision.hidden_size),
            "clip.vision.feed_forward_length": 72,
            "clip.vision.block_count": layers,
            "clip.vision.attention.head_count": heads,
            "clip.vision.attention.layer_norm_epsilon": getattr(vision, "layer_norm_eps", 1e-6),
            "clip.vision.image_mean": PROCESSOR["image_mean"],
            "clip.vision.image_std": PROCESSOR["image_std"],
            **own.metadata,
        }

    def _image_size(self) -> int:
        return _side(self.model.config.vision_config.image_size)

    def _tensors(self) -> Iterator[tuple[str, Array]]:
        own, vision = KINDS[self.family], self.model.config.vision_config
        layers = getattr(vision, "num_hidden_layers", None) or vision.depth
        # Numbers of projectors count as numbers of layers, and are up to 3.
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(layers, 4))
        for name, data in load_file(self.folder / "model.safetensors").items():
            # Older checkpoints name it so.
            older = name.replace("model.visual.", "visual.")
            for part, values in self._parts(older, data):
                stored = names.get_name(part, try_suffixes=(".weight", ".bias")) or part
                if own.projector == "mlp" and stored == "v.image_newline":
                    stored = "model.image_newline"
                if stored.startswith(("v.", "mm.", "model.image_newline")):
                    yield stored, np.ascontiguousarray(values)

    def _parts(self, name: str, data: Array) -> Iterator[tuple[str, Array]]:
        """What `modify_tensors` of the family's converter makes of a tensor."""
        own = KINDS[self.family]
        if self.family == "gemma3":
            name = name.replace("vision_tower.", "vision_tower.vision_model.")
            name = name.replace("_weight", ".weight")
            yield name, data + 1 if "soft_emb_norm.weight" in name else data
        elif own.projector == "pixtral" and name.startswith("vision_tower."):
            heads = self.model.config.vision_config.num_attention_heads
            is_rotated = name.endswith(("q_proj.weight", "k_proj.weight"))
            yield name, data[rotated_rows(heads, len(data))] if is_rotated else data
        elif self.family == "internvl":
            yield self._of_internvl(name), data
        elif own.projector == "mlp":
            yield from self._of_llava(name, data)
        elif name == "visual.patch_embed.proj.weight":
            yield "v.patch_embd.weight", data[:, :, 0]
            yield "v.patch_embd.weight.1", data[:, :, 1]
        elif own.projector == "qwen3vl_merger" and name.startswith("visual."):
            yield self._of_qwen3(name), data
        elif ".qkv." in name:
            for part, values in zip("qkv", np.split(data, 3), strict=True):
                yield name.replace("qkv", part), values
        else:
            yield name, data

    def _of_internvl(self, name: str) -> str:
        projector = {"layer_norm": "mlp1.0", "linear_1": "mlp1.1", "linear_2": "mlp1.3"}
        for part, stored in projector.items():
            name = name.replace(f"multi_modal_projector.{part}", stored)
        if name.startswith("vision_tower."):
            is_bare = "lambda_" in name or "position_embeddings" in name
            return f"model.{name}.weight" if is_bare else f"model.{name}"
        return name

    def _of_llava(self, name: str, data: Array) -> Iterator[tuple[str, Array]]:
        """As in the older convert_image_encoder_to_gguf.py, which leaves out what does not run."""
        if ".layers.2." in name or "post_layernorm" in name:
            return
        for part, stored in (("linear_1", "0"), ("linear_2", "2")):
            name = name.replace(f"multi_modal_projector.{part}", f"mm.{stored}")
        # The names of the two linears are swapped there.
        swapped = {"fc1": "fc2", "fc2": "fc1"}
        name = re.sub(r"fc[12]", lambda match: swapped[match[0]], name)
        name = name.replace("vision_tower.", "vision_tower.vision_model.")
        yield name.replace("image_newline", "model.image_newline"), data

    def _of_qwen3(self, name: str) -> str:
        if name.startswith("visual.deepstack_merger_list."):
            index, rest = name.split(".", maxsplit=3)[2:]
            layer = self.model.config.vision_config.deepstack_visual_indexes[int(index)]
            return f"v.deepstack.{layer}.{rest.replace('linear_', '')}"
        merger = {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}
        for part, stored in merger.items():
            name = name.replace(f"visual.merger.{part}", stored)
        return name.replace("visual.patch_embed.proj.bias", "v.patch_embd.bias")


def _side(value: int | list[int]) -> int:
    return value if isinstance(value, int) else value[0]


def _copy_text(text: PreTrainedModel, whole: PreTrainedModel) -> None:
    """Give the text model in `whole` the weights of `text`."""
    targets = dict(whole.named_parameters())
    with torch.no_grad():
        for name, values in text.state_dict().items():
            bare = name.removeprefix("model.")
            inside = (f"model.{module}.{bare}" for module in ("language_model", "text_model"))
            target = next(each for each in (*inside, name) if each in targets)
            targets[target].copy_(values)


def _tokens(placeholder: str) -> dict[str, Any]:
    """A byte-level tokenizer of VOCAB tokens, the last of which is the placeholder."""
    letters = sorted(ByteLevel.alphabet())[: VOCAB - 5]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "ab", placeholder]
    kinds = [CONTROL] * 3 + [NORMAL] * (VOCAB - 4) + [CONTROL]
    return {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["a b"],
    }
