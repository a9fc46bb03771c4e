"""The tags of a call whose parameters are in tags."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlSyntax:
    """The texts of one call. Blanks are allowed between any two tags."""

    before_name: str
    behind_name: str
    """Empty if a key or the end of the call follows the name."""
    before_key: str
    behind_key: str
    before_value: str = ""
    """A tag between key and value."""
    padding: str = ""
    """One of it at either end of a value does not belong to it."""
    behind_value: str
    end: str
    end_is_closer: bool = False
    """Whether the end of the call is that of its block."""
    spacing: str = "\n"
    """What a model writes between tags."""

    @property
    def value_ends(self) -> tuple[str, ...]:
        """Texts of which one ends a value."""
        padded = f"{self.padding}{self.behind_value}"
        return tuple(dict.fromkeys((padded, self.behind_value)))
