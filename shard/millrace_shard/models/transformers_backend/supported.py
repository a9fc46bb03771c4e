"""Which classes of transformers are served."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PretrainedConfig

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.transformers_backend.unlisted_class import check_unlisted

SUPPORTED = (
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "opt",
    "stablelm",
    "starcoder2",
)
"""Tests compare the logits of each with eager attention, since a class that ignores the hook is silently wrong."""


def is_listed(config: PretrainedConfig) -> bool:
    """Whether tests compare the class of `config`."""
    return config.model_type in SUPPORTED


def check_supported(
    config: PretrainedConfig, *, own: Iterable[str] = (), allow_unlisted: bool = False
) -> None:
    """Raise UnsupportedModel for architectures and quantised weights that are not supported.

    The message names the types of the families that our own decoder computes, `own`.
    """
    if not is_listed(config) and not allow_unlisted:
        raise UnsupportedModel(
            f"model_type {config.model_type!r} is not supported; these are: {', '.join((*own, *SUPPORTED))};"
            " --allow-unlisted-model tries other classes of transformers, and checks their logits at the start"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(f"quantization_config is not supported for {config.model_type}")
    if not is_listed(config):
        check_unlisted(config)
