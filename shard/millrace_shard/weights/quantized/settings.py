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
        found = self.value(*names)
        if found is None:
            found = default
        is_one = isinstance(found, (str, int, bool)) and any(
            found == each and isinstance(found, bool) == isinstance(each, bool) for each in allowed
        )
        if not is_one:
            raise UnsupportedModel(
                f"{self.method}: {names[0]}={found!r} is not supported; these are: {', '.join(map(str, allowed))}"
            )
        return found

    def flag(self, *names: str, default: bool = False) -> bool:
        found = self.value(*names)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise UnsupportedModel(f"{self.method}: {names[0]}={found!r} must be true or false")
        return found

    def group_size(self, *names: str) -> int | None:
        """Inputs of a group; None for one group of all inputs, which is -1 or null."""
        found = self.value(*names)
        if found in (None, -1):
            return None
        if not is_group(found):
            raise UnsupportedModel(
                f"{self.method}: {names[0]}={found!r} must be a positive number or -1"
            )
        return found

    def mapping(self, *names: str) -> Mapping[str, Any]:
        """An object; empty if it is absent."""
        found = self.value(*names)
        if found is None:
            return {}
        if not isinstance(found, dict):
            raise UnsupportedModel(f"{self.method}: {names[0]}={found!r} must be an object")
        return found

    def words(self, *names: str) -> tuple[str, ...]:
        """A list of strings; empty if it is absent."""
        found = self.value(*names)
        if found is None:
            return ()
        if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
            raise UnsupportedModel(f"{self.method}: {names[0]}={found!r} must be a list of names")
        return tuple(found)

    def overridden(self, changes: Mapping[str, Any]) -> Settings:
        """The same settings with other values of some fields."""
        return Settings(self.method, {**self._raw, **changes})


def is_group(found: object) -> TypeGuard[int]:
    """Whether `found` is a number of elements that share a scale."""
    return isinstance(found, int) and not isinstance(found, bool) and 1 <= found <= LARGEST_GROUP
