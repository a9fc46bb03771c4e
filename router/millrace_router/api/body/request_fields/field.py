"""What becomes of one field of a request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Support(StrEnum):
    """What becomes of a field."""

    WORKS = "works"
    NO_EFFECT = "no effect"
    """Accepted: it would not change the answer in any case, or cannot here."""
    REFUSED = "refused"
    """It would change the answer, and cannot here."""


SERVERS = {
    "T": "TGI",
    "L": "LoRAX",
    "O": "OpenAI",
    "A": "Anthropic",
    "V": "vLLM",
    "S": "SGLang",
    "C": "llama.cpp",
    "E": "TEI",
    "H": "Cohere",
    "-": "Millrace",
}
"""The servers whose contract has a field, by their letter in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestField:
    """A field of one place."""

    name: str
    support: Support
    servers: tuple[str, ...]
    note: str = ""
    neutral: tuple[Any, ...] = ()
    """Values beside null that ask for nothing: a refused field may have them."""

    def refuses(self, value: object) -> bool:
        """Return whether the field is refused with this value."""
        if self.support is not Support.REFUSED or value is None:
            return False
        # 0 == False in Python, and both ask for nothing.
        return value not in self.neutral


Fields = dict[str, RequestField]


def rows(
    support: Support,
    names: str,
    servers: str,
    note: str = "",
    *,
    neutral: Iterable[object] = (),
) -> Iterator[RequestField]:
    """Yield a field for each of the `names`, which are separated by blanks; `servers` are letters of `SERVERS`."""
    for name in names.split():
        yield RequestField(
            name=name,
            support=support,
            servers=tuple(SERVERS[letter] for letter in servers),
            note=note,
            neutral=tuple(neutral),
        )


def by_name(*groups: Iterable[RequestField]) -> Fields:
    """Return all fields by their names; a later group beats an earlier one."""
    return {field.name: field for group in groups for field in group}
