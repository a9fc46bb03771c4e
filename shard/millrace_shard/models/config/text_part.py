"""The text model of a multimodal checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace_shard.errors import UnsupportedModel

_SHARED = ("dtype", "eos_token_id", "quantization_config", "torch_dtype")
"""Fields that may stand in the outer object alone."""
_BIDIRECTIONAL = ("paligemma",)
"""Classes whose text models are bidirectional within a prompt."""


def text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object of a config.json, or its `text_config` if it has one; encoders of images and sound are ignored.

    Raises UnsupportedModel for a class that changes the attention of its text model.
    """
    text = raw.get("text_config")
    if not isinstance(text, dict):
        return raw
    if raw.get("model_type") in _BIDIRECTIONAL:
        raise UnsupportedModel(
            f"model_type={raw['model_type']!r} is not supported: its tokens attend to later ones of a prompt"
        )
    outer = {name: raw[name] for name in _SHARED if raw.get(name) is not None}
    # The outer class has the head, and says whether it is the embedding.
    own = {name: raw[name] for name in ("tie_word_embeddings",) if raw.get(name) is not None}
    return {**outer, **text, **own, "architectures": None}
