"""Which classes may start without being on the list, as far as config.json and the class tell."""

from __future__ import annotations

from transformers import PretrainedConfig

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.transformers_backend.class_of import class_of
from millrace_shard.models.transformers_backend.shape_probe import probe_skeleton

_LAYER_TYPES = ("full_attention", "sliding_attention")
_FIELDS = (
    "hidden_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)


def check_unlisted(config: PretrainedConfig) -> None:
    """Raise UnsupportedModel for a class that our paged cache cannot serve, before any weight is read."""
    kind = class_of(config)
    for reason in (
        _layers_without_attention(config),
        _other_cache(config),
        None
        if getattr(kind, "_supports_attention_backend", False)
        else "does not use the attention interface of transformers",
        "has recurrent layers" if getattr(kind, "_is_stateful", False) else None,
        _missing_field(config),
    ):
        if reason is not None:
            raise UnsupportedModel(
                f"model_type {config.model_type!r} is not supported: {kind.__name__} {reason}"
            )
    probe_skeleton(config)


def _layers_without_attention(config: PretrainedConfig) -> str | None:
    kinds = getattr(config, "layer_types", None) or ()
    other = next((kind for kind in kinds if kind not in _LAYER_TYPES), None)
    if other is None:
        return None
    return f"has layers of type {other!r}; only {' and '.join(_LAYER_TYPES)} are served"


def _other_cache(config: PretrainedConfig) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "has an encoder"
    if config.get_text_config() is not config:
        return "is multimodal"
    if getattr(config, "is_heterogeneous", False):
        return "has layers with fields of their own"
    if getattr(config, "kv_lora_rank", None):
        return "has latent attention (MLA), whose keys and values differ in width"
    return None


def _missing_field(config: PretrainedConfig) -> str | None:
    missing = [name for name in _FIELDS if not isinstance(getattr(config, name, None), int)]
    return f"has no {', '.join(missing)} in its config" if missing else None
