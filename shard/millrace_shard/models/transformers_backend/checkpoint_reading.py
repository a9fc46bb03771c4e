"""Reads a class of transformers with its weights, most of which stay in the mapped files."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from millrace_shard.errors import WeightsError
from millrace_shard.models.transformers_backend.class_of import class_of
from millrace_shard.models.transformers_backend.paged_attention import NAME


def read_class(folder: Path, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The class with its weights, which stay in the mapped files unless they need conversion. Raises WeightsError."""
    disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (OSError, SafetensorError, RuntimeError) as error:
        raise WeightsError(f"the weights in {folder} cannot be read: {error}") from error
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise WeightsError(
            f"tensor {name} has shape {list(found)}, its config says {list(expected)}"
        )
    for name in sorted(report["missing_keys"]):
        raise WeightsError(f"tensor {name} is missing from the checkpoint")
    found_model: PreTrainedModel = model
    return found_model


def mapped_dtype(config: PretrainedConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which weights stay in the mapped files, so that a rank converts no more than its part.

    That is the one that the config names, unless the class keeps parameters in float32 by its own rules.
    """
    kind = class_of(config)
    rules = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    has_own_rules = any(getattr(kind, name, None) for name in rules)
    stored = config.dtype
    is_float = isinstance(stored, torch.dtype) and stored.is_floating_point
    return stored if is_float and not has_own_rules else dtype
