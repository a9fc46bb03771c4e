"""The description of a model by the files of its folder, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError

from millrace_shard.errors import ModelError, UnsupportedModel
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.models import split
from millrace_shard.models.config import (
    LARGEST_COUNT,
    LARGEST_COUNTS,
    cache_dtype_of,
    kv_cache_scheme,
    text_part,
)
from millrace_shard.models.families.registry import FAMILIES
from millrace_shard.models.interface import ModelInfo
from millrace_shard.models.rope import (
    RopeOverride,
    longest_position,
    override_config,
    override_spec,
)
from millrace_shard.models.spec import DecoderSpec
from millrace_shard.weights.json_object import read_json_object

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SENTENCE_TRANSFORMERS = "modules.json"
"""The list of a model's parts in the format of sentence-transformers."""
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A model that our own decoder computes, which has a spec, or a class of `transformers`, which has a config."""

    model_type: str
    dtype: torch.dtype | None
    """Dtype of the weights; None if the config names none of float16, bfloat16 and float32."""
    eos_token_ids: tuple[int, ...]
    """The ids in generation_config.json, else in the config."""
    spec: DecoderSpec | None = None
    config: PretrainedConfig | None = None
    kv_cache_scheme: object = None
    """The checkpoint's setting for a quantised KV cache, unchecked."""

    @classmethod
    def read(cls, folder: Path) -> ModelDescription:
        """Read config.json and generation_config.json; no code from the folder runs.

        Raises UnsupportedModel for models that are not supported, and ModelError for a missing or invalid config.
        """
        raw = read_json_object(folder / "config.json")
        if raw is None:
            raise ModelError(f"no config.json in {folder}")
        text = text_part(raw)
        family = FAMILIES.get(str(text.get("model_type")))
        config: Any = read_any_config(folder) if family is None else None
        generation = read_json_object(folder / "generation_config.json") or {}
        eos = generation.get("eos_token_id")
        if eos is None:
            eos = config.eos_token_id if family is None else family.eos_token_id(text)
        return cls(
            model_type=str((raw if family is None else text)["model_type"]),
            dtype=_dtype(text) if config is None else config.dtype,
            eos_token_ids=_ids(eos),
            spec=None
            if family is None
            else replace(family.read(text), may_lack_head=_is_embedding(folder, text)),
            config=config,
            kv_cache_scheme=kv_cache_scheme(text),
        )

    def cache_dtype(self) -> torch.dtype | None:
        """The dtype of the KV cache that the checkpoint requests, if any. Raises UnsupportedModel for other schemes."""
        return cache_dtype_of(self.kv_cache_scheme)

    def with_rope(self, override: RopeOverride | None) -> ModelDescription:
        """The same model, with another scaling of its rotary embeddings if there is one. Raises UnsupportedModel."""
        if override is None:
            return self
        if self.spec is not None:
            return replace(self, spec=override_spec(self.spec, override))
        assert self.config is not None
        override_config(self.config, override)
        return self

    def info(self) -> ModelInfo:
        """The facts about the model that the router needs."""
        if self.spec is not None:
            windows = {layer.attention.window for layer in self.spec.layers}
            return ModelInfo(
                model_type=self.model_type,
                vocab_size=self.spec.vocab_size,
                hidden_size=self.spec.hidden_size,
                max_position_embeddings=_longest_sequence(self.spec),
                eos_token_ids=self.eos_token_ids,
                window_size=windows.pop() if len(windows) == 1 else None,
            )
        from millrace_shard.models.transformers_backend.rotary import longest_sequence  # noqa: PLC0415

        assert self.config is not None
        return ModelInfo(
            model_type=self.model_type,
            vocab_size=int(self.config.vocab_size),
            hidden_size=int(self.config.hidden_size),
            max_position_embeddings=longest_sequence(self.config),
            eos_token_ids=self.eos_token_ids,
            window_size=None,
        )

    def layer_shape(self, world_size: int) -> LayerShape:
        """The shape of a rank's layers. Raises as `check_split`."""
        if self.spec is not None:
            return split.layer_shape(self.spec, world_size)
        # The classes of transformers are imported only where one of them runs.
        from millrace_shard.models.transformers_backend.tensor_parallel import (  # noqa: PLC0415
            layer_shape,
        )

        assert self.config is not None
        return layer_shape(self.config, world_size)


def read_any_config(folder: Path) -> PretrainedConfig:
    """The config of the checkpoint in `folder`, read by `transformers`; no code from the folder runs.

    Raises UnsupportedModel for unknown model types, and ModelError for a missing or invalid config.
    """
    from transformers import CONFIG_MAPPING, AutoConfig  # noqa: PLC0415

    raw = read_json_object(folder / "config.json")
    if raw is None:
        raise ModelError(f"no config.json in {folder}")
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        from millrace_shard.models.transformers_backend.supported import SUPPORTED  # noqa: PLC0415

        raise UnsupportedModel(
            f"model_type={model_type!r} in {folder / 'config.json'} is not known; these are served:"
            f" {', '.join((*FAMILIES, *SUPPORTED))}"
        )
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
            f"{folder / 'config.json'} is not a valid {model_type} config: {error}"
        ) from error
    return config


def _longest_sequence(spec: DecoderSpec) -> int:
    """The positions that all rotations of a decoder support. Raises UnsupportedModel for more than are counted."""
    ropes = {layer.attention.rope for layer in spec.layers} - {None}
    longest = max((longest_position(rope) for rope in ropes if rope), default=spec.max_positions)
    most = LARGEST_COUNTS["max_position_embeddings"]
    if longest > most:
        raise UnsupportedModel(
            f"sequences of {longest} tokens are not supported; at most {most} is"
        )
    return longest


def _is_embedding(folder: Path, text: Mapping[str, Any]) -> bool:
    classes = text.get("architectures")
    is_base = isinstance(classes, list) and any(str(name).endswith("Model") for name in classes)
    return is_base or (folder / SENTENCE_TRANSFORMERS).is_file()


def _dtype(raw: Mapping[str, Any]) -> torch.dtype | None:
    name = raw.get("dtype") or raw.get("torch_dtype")
    return _DTYPES.get(name) if isinstance(name, str) else None


def _ids(eos: object) -> tuple[int, ...]:
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(token) is int and 0 <= token <= LARGEST_COUNT for token in ids):
        raise ModelError(f"eos_token_id={eos!r} is neither a token id nor a list of them")
    return tuple(dict.fromkeys(ids))
