"""The text model of a multimodal checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHARED = ("dtype", "eos_token_id", "quantization_config", "torch_dtype")
"""Fields that may stand in the outer object alone."""


def text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object of a config.json, or its `text_config` if it has one; encoders of images and sound are ignored."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        return raw
    outer = {name: raw[name] for name in _SHARED if raw.get(name) is not None}
    # The outer class has the head, and says whether it is the embedding.
    own = {name: raw[name] for name in ("tie_word_embeddings",) if raw.get(name) is not None}
    return {**outer, **text, **own, "architectures": None}
