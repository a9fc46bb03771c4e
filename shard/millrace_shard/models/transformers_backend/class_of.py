"""The class of transformers for a config, and the class without its weights."""

from __future__ import annotations

import copy

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.transformers_backend.paged_attention import NAME


def class_of(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The decoder's class. Raises UnsupportedModel if there is none."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(
            f"{config.model_type} is no decoder: transformers has no causal LM class for it"
        )
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kind: type[PreTrainedModel] = found[0] if isinstance(found, tuple) else found
    return kind


def skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """The class with parameters that have shapes but no memory. Raises UnsupportedModel if it cannot be made."""
    kind = class_of(config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=NAME, trust_remote_code=False
            )
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError) as error:
        raise UnsupportedModel(
            f"{kind.__name__} cannot be made from its config: {error}"
        ) from error
    found: PreTrainedModel = model
    return found
