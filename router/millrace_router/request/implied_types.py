"""What TGI's users leave unsaid in a schema: whatever has `properties` is an object.

JSON Schema lets `{"properties": …}` match any number or string as well, and a model may well choose one. TGI generates
an object, and its documentation and clients write schemas without a `type`.
"""

from __future__ import annotations

from typing import Any

_DECIDING = frozenset({"type", "$ref", "$dynamicRef", "enum", "const"})
"""Where one of these stands beside it, the schema has said what it matches."""
_ONE = ("additionalProperties", "items", "then", "else", "contains", "propertyNames")
_SEVERAL = ("anyOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def with_implied_types(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` with `type: object` wherever there are `properties` and nothing else says what it matches.

    Schemas that are negated, or only asked for (`not`, `if`), are left as they are: there it would mean something else.
    So are those of a `oneOf` beside others that match more than objects: a string that one of these matches would no
    longer count as matched twice.
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
