"""Adds the types that TGI's users leave out of schemas: a schema with `properties` describes an object.

In JSON Schema `{"properties": …}` also matches any number or string, and a model may choose one. TGI generates an
object, and its documentation and clients write schemas without a `type`.
"""

from __future__ import annotations

from typing import Any

_DECIDING = frozenset({"type", "$ref", "$dynamicRef", "enum", "const"})
"""A schema with one of these keys gets no implied type."""
_ONE = ("additionalProperties", "items", "then", "else", "contains", "propertyNames")
_SEVERAL = ("anyOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def with_implied_types(schema: dict[str, Any]) -> dict[str, Any]:
    """Return `schema` with `type: object` wherever there are `properties` and no key of `_DECIDING`.

    Schemas under `not` and `if` stay as they are, because a type would change their meaning. So do the schemas of a
    `oneOf` with others that match more than objects: a string that matches one of those would match a different number
    of schemas.
    """
    changed = dict(schema)
    for name in _ONE:
        if name in changed:
            changed[name] = _of(changed[name])
    for name in _SEVERAL:
        if isinstance(some := changed.get(name), list):
            changed[name] = [_of(one) for one in some]
    if isinstance(some := changed.get("oneOf"), list):
        implied = [_of(one) for one in some]
        if all(isinstance(one, dict) and one.get("type") == "object" for one in implied):
            changed["oneOf"] = implied
    for name in _NAMED:
        if isinstance(some := changed.get(name), dict):
            changed[name] = {key: _of(one) for key, one in some.items()}
    if isinstance(schema.get("properties"), dict) and not schema.keys() & _DECIDING:
        changed["type"] = "object"
    return changed


def _of(schema: object) -> object:
    return with_implied_types(schema) if isinstance(schema, dict) else schema
