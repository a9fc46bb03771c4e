"""The signs of a call that is an expression."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

JSON_WORDS = {"true": "true", "false": "false", "null": "null"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpressionSyntax:
    """The texts of one call. Blanks are allowed between any two of them."""

    before_name: str = ""
    edges: tuple[str, str] = ("(", ")")
    """Texts around the arguments."""
    assign: str = "="
    """Between a key and a value of the arguments."""
    comma: str = ", "
    """What a model writes between two values."""
    colon: str = ": "
    """What a model writes between a key and a value of an object."""
    quote: str = ""
    """The text on both sides of a string, which has no escapes; empty for Python's strings."""
    words: Mapping[str, str] = field(default_factory=lambda: JSON_WORDS)
    """JSON of the words that stand for values."""
    written: Mapping[str, str] = field(default_factory=lambda: JSON_WORDS)
    """The word that a grammar demands, by JSON."""

    @property
    def has_bare_keys(self) -> bool:
        """Whether the keys of objects are no strings."""
        return bool(self.quote)


PYTHON = ExpressionSyntax(
    words={**JSON_WORDS, "True": "true", "False": "false", "None": "null"},
    written={"true": "True", "false": "False", "null": "None"},
)
"""Models write JSON's words too, which templates show them."""
