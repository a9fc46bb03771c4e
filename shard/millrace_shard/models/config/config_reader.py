"""The fields of a config.json: their checks, and a record of those that were read.

The import of transformers' config classes would add 1.5 s and 150 MB to every start of a shard. A family states the
defaults of its class in transformers, since fields with default values may be absent from the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from millrace_shard.errors import UnsupportedModel

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
LARGEST_COUNTS = {
    "max_position_embeddings": 1 << 24,
    "num_attention_heads": 1 << 12,
    "num_hidden_layers": 1 << 12,
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
        """The name of the family."""
        return str(self._fields.get("model_type"))

    def value(self, name: str) -> Any:  # noqa: ANN401
        """The field as it is in the file; None if it is absent or null."""
        self._read.add(name)
        return self._fields.get(name)

    def count(self, name: str) -> int:
        """A positive whole number."""
        found = self.value(name)
        if not _is_whole(found) or found < 1:
            raise UnsupportedModel(f"{name}={found!r} must be a positive whole number")
        most = LARGEST_COUNTS.get(name, LARGEST_COUNT)
        if found > most:
            raise UnsupportedModel(f"{name}={found} is not supported; at most {most} is")
        return int(found)

    def whole(self, name: str) -> int:
        """A whole number from 0; 0 if the field is absent or null."""
        return self.count(name) if self.value(name) else 0

    def optional_count(self, name: str) -> int | None:
        """A positive whole number, or None."""
        return None if self.value(name) is None else self.count(name)

    def number(self, name: str) -> float:
        """A positive finite number."""
        found = self.value(name)
        if not is_number(found) or found <= 0:
            raise UnsupportedModel(f"{name}={found!r} must be a positive number")
        return float(found)

    def optional_number(self, name: str) -> float | None:
        """A positive finite number, or None."""
        return None if self.value(name) is None else self.number(name)

    def flag(self, name: str) -> bool:
        """True or false; false if the field is absent or null."""
        found = self.value(name)
        if found is not None and not isinstance(found, bool):
            raise UnsupportedModel(f"{name}={found!r} must be true or false")
        return bool(found)

    def check(self, name: str, allowed: Sequence[object]) -> None:
        """Refuse values of a field other than null and `allowed`."""
        found = self.value(name)
        if found is not None and found not in allowed:
            raise UnsupportedModel(f"{name}={found!r} is not supported for {self.model_type}")

    def numbers(self, name: str, length: int) -> tuple[int, ...] | None:
        """A list of `length` whole numbers, or None."""
        found = self.value(name)
        if found is None:
            return None
        if not isinstance(found, list) or len(found) != length or not all(map(_is_whole, found)):
            raise UnsupportedModel(f"{name}={found!r} must be {length} whole numbers")
        return tuple(found)

    def layer_types(
        self, num_layers: int, allowed: Sequence[str] = ("full_attention", "sliding_attention")
    ) -> tuple[str, ...] | None:
        """The field `layer_types`, one of `allowed` for each layer, or None."""
        found = self.value("layer_types")
        if found is None:
            return None
        is_list = isinstance(found, list) and all(isinstance(kind, str) for kind in found)
        if not is_list or len(found) != num_layers or set(found) - set(allowed):
            raise UnsupportedModel(
                f"layer_types={found!r} must name one of {', '.join(allowed)} for each of {num_layers} layers"
            )
        return tuple(found)

    def check_classes(self, allowed: Sequence[str]) -> None:
        """Refuse `architectures` that names another class than one of `allowed`."""
        found = self.value("architectures")
        if found and (not isinstance(found, list) or len(found) != 1 or found[0] not in allowed):
            raise UnsupportedModel(
                f"architectures={found!r} is not supported, only {' or '.join(allowed)}"
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
        """The names of all fields that have been asked for."""
        return frozenset(self._read)


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a number, within the range of float32."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return -LARGEST_NUMBER <= value <= LARGEST_NUMBER


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
