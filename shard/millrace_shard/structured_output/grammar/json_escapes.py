"""The escapes that strings in instances of a JSON Schema may use."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

SHORT = 'nrbtf\\"'
r"""Characters after a backslash. With `u` too, llguidance takes any escaped character for a name that is not listed."""
_LONG_ONLY = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
r"""Characters that need the form \u00XX."""


def allowed_escapes(schema: dict[str, Any], parts: Iterable[dict[str, Any]]) -> str | None:
    """The escapes for `schema`, whose subschemas are `parts`; None if no choice enforces the schema.

    llguidance compares names as they are written, so that a listed name with an escaped letter could occur again, with
    any value. Therefore only schemas with characters that need the long escape allow it.
    """
    if not _needs_long(schema):
        return SHORT
    return None if any(map(_lists_some_names, parts)) else f"{SHORT}u"


def _needs_long(schema: dict[str, Any]) -> bool:
    waiting: list[object] = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str) and _LONG_ONLY.search(each):
            return True
        if isinstance(each, dict):
            waiting += [*each, *each.values()]
        elif isinstance(each, list):
            waiting += each
    return False


def _lists_some_names(part: dict[str, Any]) -> bool:
    listed = part.get("properties") or part.get("patternProperties")
    return bool(listed) and part.get("additionalProperties") is not False
