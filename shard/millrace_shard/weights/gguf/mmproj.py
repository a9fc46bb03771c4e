"""An mmproj file, which has the encoder of images of a text model in another file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from millrace_shard.errors import ModelError, UnsupportedModel, WeightsError
from millrace_shard.weights.gguf import encoders, tile_encoders
from millrace_shard.weights.gguf.encoders import (
    PREFIX,
    Clip,
    Encoder,
    Fields,
    Stored,
    UnsupportedProjector,
)
from millrace_shard.weights.gguf.file_names import parts_of
from millrace_shard.weights.gguf.header import GgufHeader
from millrace_shard.weights.gguf.metadata import Metadata

log = logging.getLogger(__name__)

REMEDY = "name another file with --mmproj, or serve only text with --mmproj off"


@dataclass(frozen=True, slots=True)
class Projector:
    """How files of a projector type hold the encoder of a family."""

    read: Callable[[Clip], Encoder]
    texts: tuple[str, ...]
    """Architectures of the text model."""
    tokens: tuple[str, ...]
    """Control tokens around images; the first stands for a feature in a prompt."""
    families: Mapping[str, str] = field(default_factory=dict)
    """`model_type` by the architecture of the text model, where it is not the encoder's."""


_GEMMA = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
_IDEFICS = ("<image>", "<fake_token_around_image>", "<global-img>")
_QWEN = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
_PIXTRAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_INTERN = ("<IMG_CONTEXT>", "<img>", "</img>")
_LLAVA = ("<image>",)
_MISTRAL = ("llama", "mistral3")
_QWEN3 = {"qwen3vlmoe": "qwen3_vl_moe", "qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe"}
_FLAT = ("qwen35", "qwen35moe")
"""Architectures whose first layers read no features."""
PROJECTORS: Mapping[str, Projector] = {
    "gemma3": Projector(encoders.gemma3, ("gemma3",), _GEMMA),
    "idefics3": Projector(encoders.idefics3, ("llama",), _IDEFICS),
    "qwen2vl_merger": Projector(encoders.qwen2, ("qwen2vl",), _QWEN),
    "qwen2.5vl_merger": Projector(encoders.qwen2_5, ("qwen2vl",), _QWEN),
    "qwen3vl_merger": Projector(encoders.qwen3, ("qwen3vl", *_QWEN3), _QWEN, _QWEN3),
    "pixtral": Projector(encoders.pixtral, _MISTRAL, _PIXTRAL),
    "internvl": Projector(tile_encoders.internvl, ("llama", "qwen2", "qwen3", "qwen3moe"), _INTERN),
    "mlp": Projector(tile_encoders.llava, ("llama", "qwen2"), _LLAVA),
}
"""By `clip.projector_type`."""
WITHOUT_EFFECT = (
    "attention.layer_norm_epsilon",
    "feed_forward_length",
    "image_size",
    "projection_dim",
    "projector_type",
)
"""Keys in whose place shapes of tensors, or classes of transformers, say the same."""
UNUSED_TENSORS = frozenset({"v.token_embd.img_break"})
"""The text model has it as well."""


@dataclass(frozen=True, slots=True)
class Mmproj:
    """The encoder in a file, which was compared with the file's tensors."""

    header: GgufHeader
    kind: str
    """`clip.projector_type`."""
    encoder: Encoder
    colours: Fields

    @classmethod
    def open(cls, path: Path) -> Mmproj:
        """Raise as `read`, with a remedy."""
        try:
            return cls.read(GgufHeader.read(path))
        except ModelError as error:
            raise type(error)(f"{error}; {REMEDY}") from error

    @classmethod
    def read(cls, header: GgufHeader) -> Mmproj:
        """Raise ModelError, naming the file, for another kind of encoder and for tensors that do not fit."""
        name = header.path.name
        metadata = Metadata(header.metadata, name)
        arch = metadata.text("general.architecture")
        if arch != "clip":
            raise UnsupportedModel(f"{name} has the architecture {arch!r}, and an encoder has clip")
        kind = metadata.text("clip.projector_type") or metadata.text(f"{PREFIX}projector_type")
        if kind is None or kind not in PROJECTORS:
            raise UnsupportedProjector(
                f"{name} has clip.projector_type={kind!r}; these are supported: {', '.join(PROJECTORS)}"
            )
        clip = Clip(header, metadata)
        encoder = PROJECTORS[kind].read(clip)
        _check(header, encoder.tensors)
        colours = clip.colours()
        _refuse_unknown(metadata)
        return cls(header, kind, encoder, colours)

    @property
    def tokens(self) -> tuple[str, ...]:
        """See `Projector.tokens`."""
        return PROJECTORS[self.kind].tokens

    def config(self, text: Mapping[str, Any], arch: str, token_id: int | None, of: str) -> Fields:
        """The object of config.json around the object `text` of a text model, whose file is `of`.

        `arch` is the file's architecture, and `token_id` stands for a feature. Raises ModelError for another model's
        text.
        """
        projector, size = PROJECTORS[self.kind], text["hidden_size"]
        if arch not in projector.texts:
            self.refuse(
                f"is for text models of {' or '.join(projector.texts)}, and {of} has {arch}"
            )
        if self.encoder.text_size != size:
            self.refuse(
                f"makes features of {self.encoder.text_size} numbers, and {of} has hidden states of {size}"
            )
        if arch in _FLAT and self.encoder.vision["deepstack_visual_indexes"]:
            self.refuse(
                f"makes features for the first layers of the text model, and {of} has {arch}"
            )
        if token_id is None:
            self.refuse(f"needs the token {self.tokens[0]}, which the tokenizer of {of} lacks")
        return {
            "model_type": projector.families.get(arch, self.encoder.model_type),
            "text_config": dict(text),
            "vision_config": self.encoder.vision,
            "image_token_id": token_id,
            "dtype": text["dtype"],
            "tie_word_embeddings": text["tie_word_embeddings"],
            **self.encoder.outer,
        }

    def processor(self) -> Fields:
        """The object of preprocessor_config.json."""
        return self.colours | self.encoder.processor

    def refuse(self, reason: str) -> NoReturn:
        """Raise ModelError for a file that does not belong to the text model."""
        raise ModelError(f"{self.header.path.name} (projector_type {self.kind}) {reason}; {REMEDY}")


def is_readable(path: Path, model: Path) -> bool:
    """Whether the encoder in `path`, a file next to `model`, is known for such text models; warns if it is not.

    Raises ModelError for a damaged file.
    """
    arch = GgufHeader.read(*parts_of(model), with_lists=False).metadata.get("general.architecture")
    try:
        file = Mmproj.open(path)
        texts = PROJECTORS[file.kind].texts
        if arch not in texts:
            raise UnsupportedProjector(
                f"{path.name} (projector_type {file.kind}) reads images for {' or '.join(texts)}, not for {arch}"
            )
    except UnsupportedProjector as error:
        log.warning("images are refused, and only text is served: %s", error)
        return False
    return True


def _check(header: GgufHeader, tensors: Mapping[str, Stored]) -> None:
    """Raise unless the file has exactly these tensors, in the right shapes."""
    expected = {name: stored.part_shape for stored in tensors.values() for name in stored.names}
    for name, shape in expected.items():
        tensor = header.tensors.get(name)
        if tensor is None:
            raise WeightsError(f"tensor {name} is missing from {header.path.name}")
        if without_ones(tensor.shape) != without_ones(shape):
            raise WeightsError(
                f"tensor {name} in {header.path.name} has shape {list(tensor.shape)}, its metadata says"
                f" {list(shape)}"
            )
    extra = sorted(header.tensors.keys() - expected.keys() - UNUSED_TENSORS)
    if extra:
        raise UnsupportedProjector(
            f"{header.path.name} has tensor {extra[0]}, which is not supported"
        )


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without axes of one element before others, which ggml's tools drop."""
    first = next((axis for axis, size in enumerate(shape[:-1]) if size != 1), len(shape) - 1)
    return shape[first:]


def _refuse_unknown(metadata: Metadata) -> None:
    """Raise UnsupportedProjector for the first key that is neither understood nor without effect."""
    without_effect = {f"{PREFIX}{name}" for name in WITHOUT_EFFECT}
    for key in metadata.unread("clip."):
        if key not in without_effect and not key.startswith("clip.has_"):
            raise UnsupportedProjector(f"{metadata.describe(key)} is not supported")
