"""Loads a model from a folder, by the decoder of the Llama family or by the transformers backend."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import ModelError, UnsupportedModel
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.cpu.int8_linear import Int8Kernels
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.lora.adapter_table import AdapterTable
from millrace_shard.model_loader.weights import Weights
from millrace_shard.models.architecture import FAMILY, Architecture
from millrace_shard.models.decoder import Decoder
from millrace_shard.models.interface import CausalModel, ModelInfo
from millrace_shard.models.plain_config import PlainConfig, plain_config
from millrace_shard.models.rope import longest_position, model_rope_table, rope_kind

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class RopeOverride:
    """The flags `--rope-scaling` and `--rope-factor`, which replace the scaling of the checkpoint."""

    kind: str
    """"linear" or "dynamic"."""
    factor: float = 1.0


def load_model(  # noqa: PLR0913
    folder: Path,
    *,
    dtype: torch.dtype,
    kernels: Kernels,
    group: ProcessGroup,
    device: torch.device,
    rope_override: RopeOverride | None = None,
    max_total_tokens: int | None = None,
    adapters: AdapterTable | None = None,
) -> CausalModel:
    """Read this rank's part of the checkpoint in `folder` (config.json and safetensors) onto `device`.

    `max_total_tokens` is the length of the longest sequence, if known: it bounds the RoPE table and selects longrope's
    factors. The linears of the model become sites of `adapters`.

    Raises UnsupportedModel, WeightsError or, for a folder without a readable config, ModelError.
    """
    config = read_config(folder) if rope_override is None else read_any_config(folder)
    if rope_override is not None:
        _override_rope(config, rope_override)
    if config.model_type not in FAMILY:
        assert not isinstance(config, PlainConfig)
        # The import takes a second, and models of the family do not need it.
        from millrace_shard.models.transformers_backend import TransformersModel, check_supported  # noqa: PLC0415

        check_supported(config)
        _check_alone(config.model_type, kernels, group)
        return TransformersModel.load(
            folder,
            config,
            model_info(folder, config),
            dtype=dtype,
            kernels=kernels,
            device=device,
            max_total_tokens=max_total_tokens,
            adapters=adapters,
        )
    arch = Architecture.from_config(config)
    arch.check_split(group.world_size)
    with closing(Weights(folder, dtype=dtype, device=device, group=group)) as weights:
        rope = model_rope_table(config, max_total_tokens).to(device)
        info = model_info(folder, config)
        return Decoder(
            arch, info, rope, weights=weights, kernels=kernels, group=group, adapters=adapters
        )


def _check_alone(model_type: str, kernels: Kernels, group: ProcessGroup) -> None:
    """Raise UnsupportedModel for what only models of the family have."""
    if isinstance(kernels, Int8Kernels):
        raise UnsupportedModel(
            f"{model_type} runs without --quantize; int8 is for {', '.join(FAMILY)}"
        )
    if group.world_size > 1:
        raise UnsupportedModel(
            f"{model_type} runs on one shard only; split over several are: {', '.join(FAMILY)}"
        )


def read_config(folder: Path) -> PlainConfig | PretrainedConfig:
    """The config of the checkpoint in `folder`, read by `transformers` only if needed. Raises as `read_any_config`."""
    raw = _read_json(folder / "config.json")
    return (raw and plain_config(raw)) or read_any_config(folder)


def read_any_config(folder: Path) -> PretrainedConfig:
    """The config of the checkpoint in `folder`, read by `transformers`; no code from the folder runs.

    Raises UnsupportedModel for unknown model types, and ModelError for a missing or invalid config.
    """
    from transformers import CONFIG_MAPPING, AutoConfig  # noqa: PLC0415

    raw = _read_json(folder / "config.json")
    if raw is None:
        raise ModelError(f"no config.json in {folder}")
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise UnsupportedModel(f"model_type={kind!r} in {folder / 'config.json'} is not known")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OSError,
        StrictDataclassError,
    ) as error:
        raise ModelError(
            f"{folder / 'config.json'} is not a valid {kind} config: {error}"
        ) from error
    return config


def layer_shape(folder: Path, world_size: int) -> LayerShape:
    """The shape of a rank's layers of the model in `folder`. Raises as `read_any_config` and `check_split`."""
    config = read_config(folder)
    if config.model_type in FAMILY:
        return Architecture.from_config(config).layer_shape(world_size)
    assert not isinstance(config, PlainConfig)
    text = config.get_text_config()
    num_heads = int(text.num_attention_heads)
    without_groups = 1 if getattr(text, "multi_query", False) else num_heads
    softcap = getattr(text, "attn_logit_softcapping", None)
    return LayerShape(
        num_heads=num_heads,
        num_kv_heads=int(getattr(text, "num_key_value_heads", None) or without_groups),
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // num_heads),
        kinds=tuple((window, softcap) for window in _windows(text)),
    )


def _windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    """The attention windows that layers of a class may have, each once."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
    return tuple(dict.fromkeys(window if kind == "sliding_attention" else None for kind in kinds))


def model_info(folder: Path, config: PlainConfig | PretrainedConfig) -> ModelInfo:
    """The properties of the model; end-of-sequence ids come from generation_config.json, else from the config."""
    generation = _read_json(folder / "generation_config.json") or {}
    eos = generation.get("eos_token_id")
    return ModelInfo(
        model_type=config.model_type,
        vocab_size=int(config.vocab_size),
        max_position_embeddings=_longest_sequence(config),
        eos_token_ids=_ids(config.eos_token_id if eos is None else eos),
        window_size=Architecture.from_config(config).window
        if config.model_type in FAMILY
        else None,
    )


def _longest_sequence(config: PlainConfig | PretrainedConfig) -> int:
    if getattr(config, "rope_parameters", None):
        return longest_position(config)
    return int(config.max_position_embeddings)


def _override_rope(config: PretrainedConfig, override: RopeOverride) -> None:
    """Replace the scaling of the checkpoint but keep its base and rotary share, as TGI does."""
    if override.kind not in {"linear", "dynamic"}:
        raise UnsupportedModel(f"rope scaling {override.kind!r} is not one of: linear, dynamic")
    if not override.factor >= 1:
        raise UnsupportedModel(f"a rope factor is at least 1, not {override.factor}")
    if not getattr(config, "rope_parameters", None):
        raise UnsupportedModel(f"{config.model_type} has no rotary embedding to scale")
    rope_kind(config)
    kept = {
        k: v
        for k, v in config.rope_parameters.items()
        if k in {"rope_theta", "partial_rotary_factor"}
    }
    config.rope_parameters = {"rope_type": override.kind, "factor": override.factor, **kept}


def _ids(eos: object) -> tuple[int, ...]:
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token, int) for token in ids):
        raise ModelError(f"eos_token_id={eos!r} is neither a token id nor a list of them")
    return tuple(dict.fromkeys(ids))


def _read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None if the file does not exist."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} is not a JSON object")
    return found
