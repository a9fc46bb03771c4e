"""Parses JSON from untrusted files; a text that parsers may read differently is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from millrace_router.adapters.fetching.errors import Invalid
from millrace_router.errors import quoted

JsonObject = dict[str, Any]


def parse_object(data: bytes, *, what: str) -> JsonObject:
    """Parse a JSON object; `what` names the text in errors.

    Raises:
        Invalid: the text is no JSON object in UTF-8, has a key twice, or a number that is not finite.

    """

    def unique(pairs: Iterable[tuple[str, Any]]) -> JsonObject:
        found: JsonObject = {}
        for key, value in pairs:
            if key in found:
                raise Invalid(f"{what} has the key {quoted(key)} twice")
            if not all(map(_is_text, (key, value))):
                raise Invalid(f"{what} has half of a character at the key {quoted(key)}")
            found[key] = value
        return found

    def refuse(constant: str) -> None:
        raise Invalid(f"{what} has the number {constant}")

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError:
        raise Invalid(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise Invalid(f"{what} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Invalid(f"{what} is not a JSON object")
    return value


def _is_text(value: object) -> bool:
    """Whether a string has no lone surrogates, which UTF-8 cannot write."""
    try:
        return not isinstance(value, str) or value.encode() is not None
    except UnicodeEncodeError:
        return False
