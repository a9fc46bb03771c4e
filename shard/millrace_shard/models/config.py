"""The fields of a config.json, read without `transformers`: their checks, and a record of those that were read.

The import of transformers' config classes would add 1.5 s and 150 MB to every start of a shard. A family states the
defaults of its class in transformers, since fields with default values may be absent from the file.

Rotary embeddings come in the forms that versions of transformers write. Version 5 writes `rope_parameters`, perhaps one
object for each kind of layer; earlier ones write `rope_theta`, `rope_scaling` and `partial_rotary_factor`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.rope_spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeAxes,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)

# Fields that change the computation of some family, with the values that have no effect.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "dual_chunk_attention_config": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "no_rope_layers": ([],),
    "pretraining_tp": (1,),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "use_bidirectional_attention": (False,),
}

LARGEST_NUMBER = 3.4028234663852886e38
"""Of float32."""
LARGEST_COUNT = (1 << 31) - 1
CONFIG_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of code that meets a field of another kind than it expects."""
LARGEST_COUNTS = {
    **dict.fromkeys(("max_position_embeddings", "max_seq_len", "n_positions"), 1 << 24),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 1 << 12),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 1 << 12),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 1 << 16),
    "vocab_size": 1 << 22,
}
"""Bounds of counts by which memory is taken and loops run before tensors are compared with them."""


class ConfigReader:
    """Reads the object of a config.json. Methods raise UnsupportedModel, naming the field, for unusable values.

    A field that the object lacks has its default.
    """

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._fields = {**defaults, **raw}
        self._read: set[str] = set()

    @property
    def model_type(self) -> str:
        return str(self._fields.get("model_type"))

    def with_fields(self, **fields: object) -> ConfigReader:
        """The same reader with other values of some fields."""
        other = copy.copy(self)
        other._fields = {**self._fields, **fields}
        return other

    def value(self, name: str) -> Any:  # noqa: ANN401
        """The field as it is in the file; None if it is absent or null."""
        self._read.add(name)
        return self._fields.get(name)

    def has(self, name: str) -> bool:
        """Whether the field has a value, or is null in the file."""
        return name in self._fields

    def count(self, name: str) -> int:
        value = self.value(name)
        if not _is_whole(value) or value < 1:
            raise UnsupportedModel(f"{name}={value!r} must be a positive whole number")
        most = LARGEST_COUNTS.get(name, LARGEST_COUNT)
        if value > most:
            raise UnsupportedModel(f"{name}={value} is not supported; at most {most} is")
        return int(value)

    def whole(self, name: str) -> int:
        """A whole number from 0; 0 if the field is absent or null."""
        return self.count(name) if self.value(name) else 0

    def optional_count(self, name: str) -> int | None:
        """A positive whole number, or None."""
        return None if self.value(name) is None else self.count(name)

    def number(self, name: str) -> float:
        value = self.value(name)
        if not is_number(value) or value <= 0:
            raise UnsupportedModel(f"{name}={value!r} must be a positive number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A positive finite number, or None."""
        return None if self.value(name) is None else self.number(name)

    def flag(self, name: str) -> bool:
        """True or false; false if the field is absent or null."""
        value = self.value(name)
        if value is not None and not isinstance(value, bool):
            raise UnsupportedModel(f"{name}={value!r} must be true or false")
        return bool(value)

    def check(self, name: str, allowed: Sequence[object]) -> None:
        """Refuse values of a field other than null and `allowed`."""
        value = self.value(name)
        if value is not None and value not in allowed:
            raise UnsupportedModel(f"{name}={value!r} is not supported for {self.model_type}")

    def numbers(self, name: str, length: int) -> tuple[int, ...] | None:
        """A list of `length` whole numbers, or None."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or not all(map(_is_whole, value)):
            raise UnsupportedModel(f"{name}={value!r} must be {length} whole numbers")
        return tuple(value)

    def layer_types(
        self, num_layers: int, known: Sequence[str] = ("full_attention", "sliding_attention")
    ) -> tuple[str, ...] | None:
        """The field `layer_types`, one of `known` for each layer, or None."""
        value = self.value("layer_types")
        if value is None:
            return None
        is_list = isinstance(value, list) and all(isinstance(kind, str) for kind in value)
        if not is_list or len(value) != num_layers or set(value) - set(known):
            raise UnsupportedModel(
                f"layer_types={value!r} must name one of {', '.join(known)} for each of {num_layers} layers"
            )
        return tuple(value)

    def check_classes(self, allowed: Sequence[str]) -> None:
        """Refuse `architectures` that names another class than one of `allowed`."""
        value = self.value("architectures")
        if value and (not isinstance(value, list) or len(value) != 1 or value[0] not in allowed):
            raise UnsupportedModel(
                f"architectures={value!r} is not supported, only {' or '.join(allowed)}"
            )

    def refuse_unread(self) -> None:
        """Refuse fields that change the computation and were not read, unless their values have no effect."""
        for name in sorted(_NEUTRAL.keys() - self._read):
            self.check(name, _NEUTRAL[name])
        if "layer_types" not in self._read:
            kinds = self.value("layer_types")
            is_full = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
            if kinds and not is_full:
                raise UnsupportedModel(f"layer_types={kinds!r} is not for {self.model_type}")

    def fields_read(self) -> frozenset[str]:
        return frozenset(self._read)


def is_number(value: object) -> TypeGuard[float]:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return -LARGEST_NUMBER <= value <= LARGEST_NUMBER


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_LAYER_KINDS = ("full_attention", "sliding_attention")
_GENERAL = frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor"))
_LARGEST = 1e9
"""Of the numbers of a scaling; their reciprocals are as small."""
_ORIGINAL = "original_max_position_embeddings"
_SECTIONS = "mrope_section"
OF_AXES = frozenset((_SECTIONS, "mrope_interleaved"))
"""Parameters of rotary embeddings with several axes."""


def read_rope(
    config: ConfigReader,
    *,
    head_dim: int,
    layer_kind: str | None = None,
    theta_field: str = "rope_theta",
    interleaved: bool = False,
    extra: frozenset[str] = frozenset(),
    may_be_partial: bool = False,
) -> RopeSpec:
    """The rotary embedding of layers of `layer_kind`, or of all layers if it is None.

    `theta_field` is the field outside the object that has the base; `extra` names parameters that the family reads by
    itself; `may_be_partial` is whether its class in transformers can rotate a part of the channels.
    """
    fields = rope_parameters(config, layer_kind)
    max_positions = config.count("max_position_embeddings")
    share = fields.get("partial_rotary_factor", config.value("partial_rotary_factor"))
    if share is None:
        share = 1.0
    rotary_dim = int(head_dim * share) if is_number(share) else 0
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise UnsupportedModel(f"partial_rotary_factor={share!r} of heads of {head_dim} channels")
    if rotary_dim != head_dim and not may_be_partial:
        raise UnsupportedModel(
            f"partial_rotary_factor={share!r} is not supported for {config.model_type}"
        )
    theta = _theta(fields, config.value(theta_field))
    return RopeSpec(
        rotary_dim=rotary_dim,
        theta=theta,
        max_positions=max_positions,
        scaling=_Scaling(config, fields, rotary_dim, max_positions, extra).read(),
        interleaved=interleaved,
    )


def read_axes(
    config: ConfigReader, rope: RopeSpec, default: Sequence[int], *, alternate: bool
) -> RopeAxes:
    """The axes of a rotary embedding whose sections are `default` if the config has none; for RopeAxes."""
    value = rope_parameters(config).get(_SECTIONS, default)
    half = rope.rotary_dim // 2
    is_list = isinstance(value, list | tuple) and len(value) == 3 and all(map(_is_whole, value))
    # Where axes alternate, channels past a section belong to the first axis.
    if not is_list or min(value) < 0 or not (alternate or sum(value) == half):
        raise UnsupportedModel(f"{_SECTIONS}={value!r} must be 3 whole numbers with the sum {half}")
    return RopeAxes(sections=tuple(value), alternate=alternate)


def _theta(fields: dict[str, Any], outside: object) -> float:
    inside = fields.get("rope_theta")
    value = outside if inside is None else inside
    if not is_number(value) or value <= 1:
        raise UnsupportedModel(f"rope_theta={value!r} must be a number above 1")
    return float(value)


def rope_parameters(config: ConfigReader, layer_kind: str | None = None) -> dict[str, Any]:
    """The object with the parameters of layers of `layer_kind`; empty if the config has none.

    If layers have kinds, a `rope_scaling` applies to layers with full attention.
    """
    scaling, parameters = config.value("rope_scaling"), config.value("rope_parameters")
    fields = scaling or parameters or {}
    if not isinstance(fields, dict):
        raise UnsupportedModel(f"rope_parameters={fields!r} must be an object")
    if not any(kind in fields for kind in _LAYER_KINDS):
        return {} if scaling and layer_kind == "sliding_attention" else dict(fields)
    if layer_kind is None:
        raise UnsupportedModel(
            f"rope_parameters={fields!r} is not supported for {config.model_type}: all layers must have one kind"
        )
    own = fields.get(layer_kind) or {}
    if not isinstance(own, dict):
        raise UnsupportedModel(f"rope_parameters={fields!r} must hold objects")
    return dict(own)


class _Scaling:
    """Reads the scaling from `fields`."""

    def __init__(
        self,
        config: ConfigReader,
        fields: dict[str, Any],
        rotary_dim: int,
        max_positions: int,
        extra: frozenset[str],
    ) -> None:
        self._config = config
        self._fields = fields
        self._rotary_dim = rotary_dim
        self._max_positions = max_positions
        self._left = set(fields) - _GENERAL - extra
        self._has_axes = _SECTIONS in extra

    def read(self) -> RopeScaling | None:
        rope_type = self._fields.get("rope_type") or self._fields.get("type") or "default"
        if rope_type == "mrope" and self._has_axes:
            rope_type = "default"
        if rope_type not in _ROPE_TYPES:
            raise UnsupportedModel(
                f"rope_type {rope_type!r} is not supported; these are: {', '.join(_ROPE_TYPES)}"
            )
        made: RopeScaling | None = getattr(self, f"_{rope_type}")()
        # Other tools copy this field into every object.
        self._left.discard(_ORIGINAL)
        unknown = sorted(name for name in self._left if self._fields[name] is not None)
        if unknown:
            raise UnsupportedModel(f"rope_parameters with {', '.join(unknown)} are not supported")
        return made

    def _default(self) -> None:
        # Some checkpoints keep the factor of a scaling that they do not use.
        self._left.discard("factor")

    def _linear(self) -> LinearScaling:
        return LinearScaling(factor=self._number("factor"))

    def _dynamic(self) -> DynamicScaling:
        if self._rotary_dim == 2:
            raise UnsupportedModel("dynamic rotary embeddings of 2 channels are not supported")
        return DynamicScaling(factor=self._number("factor"))

    def _yarn(self) -> YarnScaling:
        original = self._original()
        factor = self._number("factor", self._max_positions / original)
        attention_factor = self._optional("attention_factor")
        mscale, all_dim = self._optional("mscale"), self._optional("mscale_all_dim")
        if attention_factor is None:
            attention_factor = yarn_stretch(factor, 1.0)
            if mscale and all_dim:
                attention_factor = yarn_stretch(factor, mscale) / yarn_stretch(factor, all_dim)
        truncate = self._take("truncate")
        return YarnScaling(
            factor=factor,
            original_positions=original,
            attention_factor=attention_factor,
            beta_fast=self._optional("beta_fast") or 32,
            beta_slow=self._optional("beta_slow") or 1,
            truncate=True if truncate is None else bool(truncate),
        )

    def _longrope(self) -> LongRopeScaling:
        original = self._original()
        factor = self._number("factor", self._max_positions / original)
        attention_factor = self._optional("attention_factor")
        if attention_factor is None:
            longer = math.log(factor) / math.log(original) if min(factor, original) > 1 else 0.0
            attention_factor = math.sqrt(1 + longer)
        return LongRopeScaling(
            short_factors=self._factors("short_factor"),
            long_factors=self._factors("long_factor"),
            original_positions=original,
            attention_factor=attention_factor,
        )

    def _llama3(self) -> Llama3Scaling:
        low, high = self._number("low_freq_factor"), self._number("high_freq_factor")
        if low >= high:
            raise UnsupportedModel(
                f"rope_parameters: low_freq_factor={low} must be below high_freq_factor={high}"
            )
        return Llama3Scaling(
            factor=self._number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_positions=self._original(),
        )

    def _original(self) -> int:
        """The length before the scaling; a field outside the object comes first, as in transformers."""
        own = self._take(_ORIGINAL)
        value = self._config.value(_ORIGINAL) or own or self._max_positions
        if not is_number(value) or not 1 <= value <= LARGEST_COUNT:
            raise UnsupportedModel(f"{_ORIGINAL}={value!r} must be a positive whole number")
        return int(value)

    def _number(self, name: str, default: float | None = None) -> float:
        value = self._optional(name)
        if value is None:
            value = default
        if not value:
            raise UnsupportedModel(f"rope_parameters have no {name}, or it is 0")
        return value

    def _optional(self, name: str) -> float | None:
        value = self._take(name)
        if value is None:
            return None
        if not is_number(value) or not (value == 0 or 1 / _LARGEST <= value <= _LARGEST):
            raise UnsupportedModel(f"rope_parameters: {name}={value!r} must be a positive number")
        return float(value)

    def _factors(self, name: str) -> tuple[float, ...]:
        value = self._take(name)
        count = self._rotary_dim // 2
        is_list = isinstance(value, list) and len(value) == count
        if not is_list or not all(is_number(each) and each > 0 for each in value):
            raise UnsupportedModel(f"rope_parameters: {name} must be {count} positive numbers")
        return tuple(map(float, value))

    def _take(self, name: str) -> Any:  # noqa: ANN401
        self._left.discard(name)
        return self._fields.get(name)


def yarn_stretch(factor: float, mscale: float) -> float:
    """The factor of cosines and sines for a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


_SHARED = ("dtype", "eos_token_id", "quantization_config", "torch_dtype")
"""Fields that only the outer object may have."""


def text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object of a config.json, or its `text_config` if it has one, with what the outer object says of it."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        return raw
    outer = {name: raw[name] for name in _SHARED if raw.get(name) is not None}
    # The outer class has the head, and whether it is the embedding.
    own = {name: raw[name] for name in ("tie_word_embeddings",) if raw.get(name) is not None}
    if raw.get("model_type") == "paligemma":
        # `VisionSpec.mask` says what its tokens see.
        own["use_bidirectional_attention"] = False
    if raw.get("model_type") == "paligemma" and text.get("model_type") == "gemma2":
        # A prompt sees all of itself, also what is behind the window, which attention here does not.
        lengths = {"max_position_embeddings": 8192, "sliding_window": 4096}
        values = [text.get(name) or default for name, default in lengths.items()]
        if all(isinstance(value, int) for value in values):
            own["max_position_embeddings"] = min(values)
    return {**outer, **text, **own, "architectures": None}


SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
"""The only supported scheme: fp8_e4m3fn with scales from the checkpoint. Absent fields have these values."""


def kv_cache_scheme(raw: Mapping[str, Any]) -> object:
    """The scheme in the object of a config.json, as it is; None if there is none."""
    quantization = raw.get("quantization_config") or raw.get("compression_config")
    return quantization.get("kv_cache_scheme") if isinstance(quantization, dict) else None


def cache_dtype_of(scheme: object) -> torch.dtype | None:
    """The dtype of the KV cache that a scheme means; None without one. Raises UnsupportedModel for other schemes."""
    if scheme is None:
        return None
    fields = scheme if isinstance(scheme, dict) else {}
    wrong = {
        name: fields.get(name) for name, value in SCHEME.items() if fields.get(name, value) != value
    }
    if wrong or not isinstance(scheme, dict):
        raise UnsupportedModel(
            f"kv_cache_scheme={scheme!r} is not supported, only {SCHEME}; "
            "--kv-cache-dtype fp8_e4m3fn, fp8_e5m2 or int8 is used in its place"
        )
    return torch.float8_e4m3fn
