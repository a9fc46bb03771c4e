"""The description of a model by the files of its folder, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError

from millrace_shard.errors import ModelError, UnsupportedModel
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.layer_weights import Activation
from millrace_shard.models import split
from millrace_shard.models.config import (
    CONFIG_ERRORS,
    LARGEST_COUNT,
    LARGEST_COUNTS,
    cache_dtype_of,
    is_number,
    kv_cache_scheme,
    text_part,
)
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.registry import FAMILIES, SAME_TYPES, nearest_family
from millrace_shard.models.interface import ModelInfo
from millrace_shard.models.rope import (
    RopeOverride,
    longest_sequence,
    override_config,
    override_spec,
)
from millrace_shard.models.spec import AttentionSpec, DecoderSpec, ExpertsSpec
from millrace_shard.weights.checkpoint_files import TOKENIZER, file_state
from millrace_shard.weights.json_object import read_json_object

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SENTENCE_TRANSFORMERS = "modules.json"
"""The list of a model's parts in the format of sentence-transformers."""
END_TOKENS = ("eos_token", "eot_token")
"""Names of end tokens in the files of a tokenizer: of a text, and of a turn."""
COUNTS_OF_LAYERS = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_key_value_heads",
)
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A model that our own decoder computes, which has a spec, or a class of `transformers`, which has a config."""

    model_type: str
    dtype: torch.dtype | None
    """Dtype of the weights; None if the config names none of float16, bfloat16 and float32."""
    eos_token_ids: tuple[int, ...]
    """All that generation_config.json, the config and the tokenizer name, in this order."""
    spec: DecoderSpec | None = None
    config: PretrainedConfig | None = None
    kv_cache_scheme: object = None
    """The checkpoint's setting for a quantised KV cache, unchecked."""

    @classmethod
    def read(cls, folder: Path) -> ModelDescription:
        """Read config.json, generation_config.json and the tokenizer's end tokens; no code from the folder runs.

        Raises UnsupportedModel for models that are not supported, and ModelError for a missing or invalid config.
        """
        raw = read_json_object(folder / "config.json")
        if raw is None:
            raise ModelError(f"no config.json in {folder}")
        text = text_part(raw)
        family = family_of(text)
        config: Any = read_any_config(folder) if family is None else None
        ends = _end_ids(folder, raw, text)
        if not ends and "eos_token_id" not in text:
            # What the class in transformers assumes, where no file names a token.
            ends = _ids(config.eos_token_id if family is None else family.eos_token_id(text))
        return cls(
            model_type=str((raw if family is None else text)["model_type"]),
            dtype=_dtype(text) if config is None else config.dtype,
            eos_token_ids=ends,
            spec=None
            if family is None
            else replace(_spec_of(family, text), may_lack_head=_is_embedding(folder, text)),
            config=config,
            kv_cache_scheme=kv_cache_scheme(text),
        )

    def cache_dtype(self) -> torch.dtype | None:
        """The dtype of the KV cache that the checkpoint requests, if any. Raises UnsupportedModel for other schemes."""
        return cache_dtype_of(self.kv_cache_scheme)

    def num_parameters(self) -> int | None:
        """Parameters of all matrices, whatever their codes; None for a class of `transformers`."""
        return None if self.spec is None else _num_parameters(self.spec)

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
            windows = {each.window for each in self.spec.attentions}
            return ModelInfo(
                model_type=self.model_type,
                vocab_size=self.spec.vocab_size,
                hidden_size=self.spec.hidden_size,
                max_position_embeddings=_longest_sequence(self.spec),
                eos_token_ids=self.eos_token_ids,
                window_size=windows.pop() if len(windows) == 1 else None,
                capturable=not (self.spec.is_recurrent or self.spec.reads_hosts),
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

    def layer_shapes(self, world_size: int) -> tuple[LayerShape, ...]:
        """The shapes of a rank's layers, one for each size of heads. Raises as `check_split`."""
        if self.spec is not None:
            return split.layer_shapes(self.spec, world_size)
        return (self.layer_shape(world_size),)

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


def family_of(text: Mapping[str, Any]) -> Family | None:
    """The family that computes the text model of this object of a config.json; None if no one of ours does."""
    model_type = str(text.get("model_type"))
    return FAMILIES.get(model_type) or SAME_TYPES.get(model_type)


def _spec_of(family: Family, text: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a model. Raises UnsupportedModel."""
    try:
        return family.read(text)
    except ModelError:
        raise
    except CONFIG_ERRORS as error:
        raise UnsupportedModel(
            f"config.json has a field that no {text['model_type']} has in this form: {error}"
        ) from error


def _num_parameters(spec: DecoderSpec) -> int:
    total, others = spec.vocab_size * (1 if spec.tied_head else 2), 0
    for layer in spec.layers:
        heads, forward = layer.attention, layer.feed_forward
        if layer.recurrent is not None:
            total += sum(layer.recurrent.outputs.values()) + layer.recurrent.inner
        if layer.attends and heads.latent is None:
            total += 2 * (heads.num_heads + heads.num_kv_heads) * heads.head_dim
        if not layer.has_feed_forward:
            continue
        first, *shared = forward.widths
        act = forward.activation
        linears = 2 if isinstance(act, Activation) and not act.has_gate else 3
        if isinstance(forward, ExpertsSpec):
            size, count = forward.latent_size or 0, forward.router.num_experts
            total += count + linears * sum(shared) + 2 * size
            others += count * linears * first * (size or spec.hidden_size)
        else:
            total += linears * first
    # Linears of latents do not all have the hidden size on a side.
    latents = (_latent_parameters(each, spec.hidden_size) for each in spec.attentions)
    return total * spec.hidden_size + others + sum(latents)


def _latent_parameters(heads: AttentionSpec, hidden: int) -> int:
    latent = heads.latent
    if latent is None:
        return 0
    queries, made = heads.num_heads * latent.head_width, latent.query_dim
    of_queries = hidden * queries if made is None else (hidden + queries) * made
    of_heads = heads.num_heads * (latent.key_dim + latent.value_dim) * latent.dim
    return of_queries + of_heads + hidden * (heads.head_dim + heads.out_width)


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
            f" {', '.join((*FAMILIES, *SUPPORTED))}; the nearest is {nearest_family(text_part(raw))}"
        )
    _check_counts(text_part(raw))
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        _check_counts(config.to_dict())
    except ModelError:
        raise
    except (*CONFIG_ERRORS, OSError, StrictDataclassError) as error:
        raise ModelError(
            f"{folder / 'config.json'} is not a valid {model_type} config: {error}"
        ) from error
    return config


def _check_counts(fields: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for counts that are too large, or none of which a layer can be made."""
    for name, most in LARGEST_COUNTS.items():
        value = fields.get(name)
        if is_number(value) and value > most:
            raise UnsupportedModel(f"{name}={value} is not supported; at most {most} is")
    for name in COUNTS_OF_LAYERS:
        value = fields.get(name)
        if value is not None and not (type(value) is int and value > 0):
            raise UnsupportedModel(f"{name}={value!r} must be a positive whole number")


def _longest_sequence(spec: DecoderSpec) -> int:
    """The positions that all rotations of a decoder support. Raises UnsupportedModel for more than are counted."""
    longest = longest_sequence(spec)
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


def _end_ids(folder: Path, raw: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a sequence by any file of `folder`, each once; the config is `raw`, its text model's `text`."""
    generation = read_json_object(folder / "generation_config.json") or {}
    named = [_ids(holder.get("eos_token_id")) for holder in (generation, text, raw)]
    size = text.get("vocab_size")
    most = size if isinstance(size, int) else LARGEST_COUNT
    return tuple(
        dict.fromkeys(chain(*named, (id_ for id_ in _tokenizer_ends(folder) if id_ < most)))
    )


def _tokenizer_ends(folder: Path) -> tuple[int, ...]:
    """The ids of the tokens that end a text or a turn by the tokenizer's files, as far as they are there."""
    config = read_json_object(folder / "tokenizer_config.json") or {}
    older = read_json_object(folder / "special_tokens_map.json") or {}
    names = [config.get(name) or older.get(name) for name in END_TOKENS]
    texts = [name.get("content") if isinstance(name, dict) else name for name in names]
    ends = tuple(text for text in texts if isinstance(text, str))
    path = folder / TOKENIZER
    return _ids_in(path, file_state(path), ends) if ends and path.is_file() else ()


@lru_cache(maxsize=4)
def _ids_in(path: Path, state: str, texts: tuple[str, ...]) -> tuple[int, ...]:  # noqa: ARG001
    """The ids of tokens in a tokenizer.json of this state.

    A start describes the model eight times, and a large tokenizer takes half a second to read.
    """
    ids = _token_ids(read_json_object(path) or {})
    known = (ids.get(text) for text in texts)
    return tuple(id_ for id_ in known if type(id_) is int and id_ >= 0)


def _token_ids(tokenizer: Mapping[str, Any]) -> dict[object, object]:
    """The ids of the tokens of a tokenizer.json by text, unchecked; empty for another structure."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids: dict[object, object] = {}
    if isinstance(vocab, dict):
        ids.update(vocab)
    elif isinstance(vocab, list):
        # Unigram models have pairs of a piece and its score.
        pairs = ((id_, pair) for id_, pair in enumerate(vocab) if isinstance(pair, list) and pair)
        ids.update((str(pair[0]), id_) for id_, pair in pairs)
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict):
            ids[str(token.get("content"))] = token.get("id")
    return ids


def _ids(eos: object) -> tuple[int, ...]:
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(token) is int and 0 <= token <= LARGEST_COUNT for token in ids):
        raise ModelError(f"eos_token_id={eos!r} is neither a token id nor a list of them")
    return tuple(dict.fromkeys(ids))
