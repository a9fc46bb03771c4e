"""How strings of a JSON Schema's instances may be written."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

SHORT = 'nrbtf\\"'
r"""What may follow a backslash; with a `u` as well, llguidance takes any character for a name that is not listed."""
_LONG_ONLY = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
r"""Characters that have to be written as \u00XX."""


def allowed_escapes(schema: dict[str, Any], parts: Iterable[dict[str, Any]]) -> str | None:
    """For llguidance, of `schema` and all schemas within it; None where it cannot be both kept and followed.

    A name that is listed could come once more with a letter of it escaped, and then with any value: llguidance compares
    names as they are written. So the long escape is for schemas alone that ask for characters which need it.
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
