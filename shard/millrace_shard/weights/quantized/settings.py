"""The fields of a quantization_config, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from millrace_shard.errors import UnsupportedModel

LARGEST_GROUP = 1 << 24
"""Of inputs, outputs or elements that share a scale; no weight is wider."""


class Settings:
    """Reads the object of a quantization_config. Methods raise UnsupportedModel, naming method and field.

    A field that has had other names is read by the first of them that is there.
    """

    def __init__(self, method: str, raw: Mapping[str, Any]) -> None:
        self.method = method
        self._raw = raw

    def value(self, *names: str) -> Any:  # noqa: ANN401
        """The field as it is in the file; None if it is absent or null."""
        return next((self._raw[name] for name in names if self._raw.get(name) is not None), None)

    def choice(self, *names: str, allowed: Sequence[object], default: object = None) -> Any:  # noqa: ANN401
        value = self.value(*names)
        if value is None:
            value = default
        is_one = isinstance(value, (str, int, bool)) and any(
            value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed
        )
        if not is_one:
            raise UnsupportedModel(
                f"{self.method}: {names[0]}={value!r} is not supported; these are: {', '.join(map(str, allowed))}"
            )
        return value

    def flag(self, *names: str, default: bool = False) -> bool:
        value = self.value(*names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UnsupportedModel(f"{self.method}: {names[0]}={value!r} must be true or false")
        return value

    def group_size(self, *names: str) -> int | None:
        """Inputs of a group; None for one group of all inputs, which is -1 or null."""
        value = self.value(*names)
        if value in (None, -1):
            return None
        if not is_group(value):
            raise UnsupportedModel(
                f"{self.method}: {names[0]}={value!r} must be a positive number or -1"
            )
        return value

    def mapping(self, *names: str) -> Mapping[str, Any]:
        """An object; empty if it is absent."""
        value = self.value(*names)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise UnsupportedModel(f"{self.method}: {names[0]}={value!r} must be an object")
        return value

    def words(self, *names: str) -> tuple[str, ...]:
        """A list of strings; empty if it is absent."""
        value = self.value(*names)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise UnsupportedModel(f"{self.method}: {names[0]}={value!r} must be a list of names")
        return tuple(value)

    def overridden(self, changes: Mapping[str, Any]) -> Settings:
        """The same settings with other values of some fields."""
        return Settings(self.method, {**self._raw, **changes})


def is_group(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST_GROUP
