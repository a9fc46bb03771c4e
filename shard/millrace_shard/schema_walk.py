"""Where a JSON Schema holds further schemas (draft 2020-12, and what older drafts had in their place)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords with an object of schemas."""
IN_PLACE = frozenset({"allOf", "anyOf", "oneOf"})
"""Keywords with a list of schemas for the same value."""
LISTS = IN_PLACE | {"prefixItems", "items"}
"""Keywords with a list of schemas; `items` is one in older drafts."""
SINGLES = frozenset(
    {
        *("items", "additionalItems", "unevaluatedItems", "contains"),
        *("additionalProperties", "unevaluatedProperties", "propertyNames"),
        *("not", "if", "then", "else"),
    }
)
"""Keywords with one schema."""


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas directly within `schema`, with their paths from it; things that are no schemas are left out."""
    for name, found in schema.items():
        if isinstance(found, list):
            if name in LISTS:
                yield from ((f"{name}/{index}", sub) for index, sub in enumerate(found))
        elif isinstance(found, dict) and name in MAPS:
            yield from ((f"{name}/{key}", sub) for key, sub in found.items())
        elif isinstance(found, dict | bool) and name in SINGLES:
            yield name, found
