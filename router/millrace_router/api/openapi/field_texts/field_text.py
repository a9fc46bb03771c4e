"""The words about one field."""

from __future__ import annotations

from typing import NamedTuple


class FieldText(NamedTuple):
    """A sentence about a field, the values that it takes, and what stands for it where it is absent or null."""

    sentence: str
    values: str
    default: str

    def __str__(self) -> str:
        return f"{self.sentence} Range: {self.values}. Default: {self.default}."


SWITCH = "true or false"
"""Values of a field that turns something on or off."""
