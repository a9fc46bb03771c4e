"""From a folder to a model that runs: which path serves it, and what the router must know of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from millrace_shard.architecture import FAMILY, Architecture
from millrace_shard.decoder import Decoder
from millrace_shard.errors import ModelError, UnsupportedModel
from millrace_shard.kernels.base import Kernels
from millrace_shard.model import CausalModel, ModelInfo
from millrace_shard.parallel import ProcessGroup
from millrace_shard.rope import longest_position, rope_kind, rope_table
from millrace_shard.transformers_backend import TransformersModel
from millrace_shard.weights import Weights


@dataclass(frozen=True, slots=True)
class RopeOverride:
    """`--rope-scaling` and `--rope-factor`: replaces the scaling of the checkpoint."""

    kind: str
    """"linear" or "dynamic"."""
    factor: float = 1.0


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    kernels: Kernels,
    group: ProcessGroup,
    device: torch.device,
    rope_override: RopeOverride | None = None,
    max_total_tokens: int | None = None,
) -> CausalModel:
    """Read this rank's part of the checkpoint in `folder` (config.json and safetensors) onto `device`.

    `max_total_tokens` is the longest sequence that will be asked for, when that is known: it bounds the RoPE table and
    chooses longrope's factors. Raises UnsupportedModel, WeightsError or, for a folder without a readable config,
    ModelError.
    """
    config = read_config(folder)
    if rope_override is not None:
        _override_rope(config, rope_override)
    info = model_info(folder, config)
    if config.model_type not in FAMILY:
        return TransformersModel.load(
            folder, config, info, dtype=dtype, kernels=kernels, group=group, device=device
        )
    arch = Architecture.from_config(config)
    arch.check_split(group.world_size)
    num_positions = min(info.max_position_embeddings, max_total_tokens or info.max_position_embeddings)
    ...
