"""The fields of a config.json for rotary embeddings, in the forms that versions of transformers write.

Version 5 writes `rope_parameters`, perhaps one object for each kind of layer; earlier ones write `rope_theta`,
`rope_scaling` and `partial_rotary_factor`.
"""

from __future__ import annotations

import math
from typing import Any

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.config.config_reader import LARGEST_COUNT, ConfigReader, is_number
from millrace_shard.models.spec.rope_spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)

_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_LAYER_KINDS = ("full_attention", "sliding_attention")
_GENERAL = frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor"))
_LARGEST = 1e9
"""Of the numbers of a scaling; their reciprocals are as small."""
_ORIGINAL = "original_max_position_embeddings"


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
    itself; `may_be_partial` says whether its class in transformers can rotate a part of the channels.
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


def _theta(fields: dict[str, Any], outside: object) -> float:
    own = fields.get("rope_theta")
    found = outside if own is None else own
    if not is_number(found) or found <= 1:
        raise UnsupportedModel(f"rope_theta={found!r} must be a number above 1")
    return float(found)


def rope_parameters(config: ConfigReader, layer_kind: str | None = None) -> dict[str, Any]:
    """The object with the parameters of layers of `layer_kind`; empty if the config has none.

    A `rope_scaling`, if layers have kinds, is that of layers with full attention.
    """
    scaling, found = config.value("rope_scaling"), config.value("rope_parameters")
    fields = scaling or found or {}
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

    def read(self) -> RopeScaling | None:
        kind = self._fields.get("rope_type") or self._fields.get("type") or "default"
        if kind not in _ROPE_TYPES:
            raise UnsupportedModel(
                f"rope_type {kind!r} is not supported; these are: {', '.join(_ROPE_TYPES)}"
            )
        made: RopeScaling | None = getattr(self, f"_{kind}")()
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
            attention_factor = _stretch(factor, 1.0)
            if mscale and all_dim:
                attention_factor = _stretch(factor, mscale) / _stretch(factor, all_dim)
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
        found = self._config.value(_ORIGINAL) or own or self._max_positions
        if not is_number(found) or not 1 <= found <= LARGEST_COUNT:
            raise UnsupportedModel(f"{_ORIGINAL}={found!r} must be a positive whole number")
        return int(found)

    def _number(self, name: str, default: float | None = None) -> float:
        found = self._optional(name)
        if found is None:
            found = default
        if not found:
            raise UnsupportedModel(f"rope_parameters have no {name}, or it is 0")
        return found

    def _optional(self, name: str) -> float | None:
        found = self._take(name)
        if found is None:
            return None
        if not is_number(found) or not (found == 0 or 1 / _LARGEST <= found <= _LARGEST):
            raise UnsupportedModel(f"rope_parameters: {name}={found!r} must be a positive number")
        return float(found)

    def _factors(self, name: str) -> tuple[float, ...]:
        found = self._take(name)
        count = self._rotary_dim // 2
        is_list = isinstance(found, list) and len(found) == count
        if not is_list or not all(is_number(each) and each > 0 for each in found):
            raise UnsupportedModel(f"rope_parameters: {name} must be {count} positive numbers")
        return tuple(map(float, found))

    def _take(self, name: str) -> Any:  # noqa: ANN401
        self._left.discard(name)
        return self._fields.get(name)


def _stretch(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
