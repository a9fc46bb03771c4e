"""The classes of transformers that are served, and the attention of a class, known without its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from millrace_shard.device.process_group import GroupError
from millrace_shard.errors import ModelError, UnsupportedModel
from millrace_shard.models.config import CONFIG_ERRORS
from millrace_shard.models.transformers_backend.paged_attention import (
    NAME,
    AttentionRule,
    attending,
)
from millrace_shard.weights.checkpoint_files import ENCODERS


def class_of(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The decoder's class. Raises UnsupportedModel if there is none."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{config.model_type} has an encoder and a decoder; only models of one decoder are served"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(
            f"{config.model_type} is not a decoder: transformers has no causal LM class for it"
        )
    classes = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    decoder_class: type[PreTrainedModel] = classes[0] if isinstance(classes, tuple) else classes
    return decoder_class


def skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """The class with parameters that have shapes but no memory. Raises UnsupportedModel if it cannot be made."""
    kind = class_of(config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=NAME, trust_remote_code=False
            )
    except ModelError:
        raise
    except (*CONFIG_ERRORS, ImportError) as error:
        raise UnsupportedModel(
            f"{kind.__name__} cannot be made from its config: {error}"
        ) from error
    found: PreTrainedModel = model
    return found


_OF_CLASSES = (TypeError, ValueError, LookupError, AttributeError, RuntimeError)
"""Errors by which the code of a class shows that it cannot take a step of ours."""


@dataclass(slots=True)
class ShapeProbe:
    """Records the heads and windows of every layer; its outputs are zeros."""

    layers: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Key-value heads and their width."""
    num_heads: dict[int, int] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)

    def __call__(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule
    ) -> Tensor:
        """See Attention. Raises UnsupportedModel for shapes that the paged cache cannot hold."""
        if keys.shape != values.shape or queries.shape[1] % keys.shape[1]:
            shapes = ", ".join(str(list(t.shape[1:])) for t in (queries, keys, values))
            raise UnsupportedModel(
                f"attention with queries, keys and values of {shapes} is not supported"
            )
        if layer in self.layers:
            raise UnsupportedModel(f"layer {layer} attends more than once")
        self.layers[layer] = (keys.shape[1], keys.shape[2])
        self.num_heads[layer] = queries.shape[1]
        self.windows[layer] = rule.window
        return torch.zeros_like(queries).flatten(1)


def probed(model: PreTrainedModel) -> ShapeProbe:
    """The shapes of a loaded model. Raises UnsupportedModel, and GroupError if another rank is gone."""
    probe, kind = ShapeProbe(), type(model).__name__
    with refusing_errors_of(f"{kind} does not run on paged attention"):
        _run(model, probe)
    if not probe.layers or sorted(probe.layers) != list(range(len(probe.layers))):
        raise UnsupportedModel(f"{kind} does not attend in every layer")
    return probe


def probe_skeleton(config: PretrainedConfig) -> None:
    """Raise UnsupportedModel for attention that is not supported, as far as a class without weights shows it."""
    model = skeleton(config)
    # Code that reads values, such as a mixture's routing, fails without them: the loaded model is probed again.
    with (
        refusing_errors_of(f"{type(model).__name__} does not run on paged attention"),
        suppress(RuntimeError),
    ):
        _run(model, ShapeProbe())


@contextmanager
def refusing_errors_of(failure: str) -> Iterator[None]:
    """Turn errors of a class's code into UnsupportedModel with a text that begins with `failure`."""
    try:
        yield
    except (ModelError, GroupError):
        raise
    except _OF_CLASSES as error:
        raise UnsupportedModel(f"{failure}: {error}") from error


@torch.inference_mode()
def _run(model: PreTrainedModel, probe: ShapeProbe) -> None:
    tokens = torch.arange(2, device=model.device).unsqueeze(0)
    with attending(probe):
        model(input_ids=tokens, position_ids=tokens, use_cache=False, logits_to_keep=0)


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
        return "has layers whose fields differ"
    if getattr(config, "kv_lora_rank", None):
        return "has latent attention (MLA), whose keys and values differ in width"
    return None


def _missing_field(config: PretrainedConfig) -> str | None:
    missing = [name for name in _FIELDS if not isinstance(getattr(config, name, None), int)]
    return f"has no {', '.join(missing)} in its config" if missing else None


SUPPORTED = (
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "opt",
    "phi",
    "stablelm",
    "starcoder2",
)
"""Tests compare the logits of each with eager attention, since a class that ignores the hook is silently wrong."""


def is_listed(config: PretrainedConfig) -> bool:
    """Whether tests compare the class of `config`."""
    return config.model_type in SUPPORTED


def _what_else(config: PretrainedConfig) -> str:
    """The flag that tries a class, or why it would be refused."""
    if config.model_type in ENCODERS:
        return "it only encodes"
    try:
        check_unlisted(config)
    except UnsupportedModel as error:
        return str(error)
    return "--allow-unlisted-model tries other classes of transformers, and checks their logits at the start"


def check_supported(
    config: PretrainedConfig,
    *,
    own: Iterable[str] = (),
    nearest: Callable[[Mapping[str, Any]], str] | None = None,
    allow_unlisted: bool = False,
) -> None:
    """Raise UnsupportedModel for architectures and quantised weights that are not supported.

    The message names the types of the families that our own decoder computes, `own`, and that which is `nearest`.
    """
    if not is_listed(config) and not allow_unlisted:
        raise UnsupportedModel(
            f"model_type {config.model_type!r} is not supported; these are: {', '.join((*own, *SUPPORTED))};"
            f" {_what_else(config)}{'' if nearest is None else f'; the nearest is {nearest(config.to_dict())}'}"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(f"quantization_config is not supported for {config.model_type}")
    if not is_listed(config):
        check_unlisted(config)
