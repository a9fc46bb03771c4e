"""A family of models that our own decoder computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.config import ConfigReader
from millrace_shard.models.spec import DecoderSpec

GENERAL: Mapping[str, Any] = {"hidden_act": "silu", "rope_theta": 10_000.0}
"""Defaults of most classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family, and how its configs are read."""

    model_type: str
    same_types: tuple[str, ...] = ()
    """Other values of `model_type` for the same class."""
    classes: tuple[str, ...]
    """The values of `architectures` that mean this family."""
    spec: Callable[[ConfigReader], DecoderSpec]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of the class in transformers for fields that the file may lack, in addition to GENERAL."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of fields, which the class in transformers takes and may write, and the names of their fields."""
    without_effect: tuple[str, ...] = ()
    """Fields of the class that do not change a forward pass, in addition to those that no family reads."""

    def read(self, raw: Mapping[str, Any]) -> DecoderSpec:
        """Read the object of a config.json. Raises UnsupportedModel, naming the field."""
        for alias, name in self.aliases.items():
            if raw.get(alias) is not None:
                if raw.get(name) not in (None, raw[alias]):
                    raise UnsupportedModel(
                        f"{alias}={raw[alias]!r} contradicts {name}={raw[name]!r}"
                    )
                raw = {**raw, name: raw[alias]}
        spec, config = self._read(raw)
        config.refuse_unread()
        return spec

    def fields(self, raw: Mapping[str, Any]) -> frozenset[str]:
        """The names of all fields that change what `read` makes of the object, aliases among them. Raises as `read`."""
        return self._read(raw)[1].fields_read() | self.aliases.keys() | {"eos_token_id", "dtype"}

    def _read(self, raw: Mapping[str, Any]) -> tuple[DecoderSpec, ConfigReader]:
        config = ConfigReader(raw, {**GENERAL, **self.defaults})
        config.check_classes((*self.classes, *map(base_class, self.classes)))
        return self.spec(config), config

    def eos_token_id(self, raw: Mapping[str, Any]) -> object:
        """The field of that name: a token id, a list of them, or None; not checked."""
        return raw.get("eos_token_id", self.defaults.get("eos_token_id"))


def base_class(name: str) -> str:
    """The name of a class without its head, such as Qwen3Model for Qwen3ForCausalLM."""
    return name.removesuffix("ForCausalLM") + "Model"
