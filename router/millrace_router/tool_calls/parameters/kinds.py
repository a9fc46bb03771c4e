"""The JSON types that a schema allows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Kinds = frozenset[str] | None
"""Names of JSON Schema's types, `integer` as `number`; None if the schema does not tell."""
_MAX_STEPS = 8
_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (str, "string"),
    (int, "number"),
    (float, "number"),
    (list, "array"),
    (dict, "object"),
    (type(None), "null"),
)


def kind_of(value: object) -> str:
    """Return the type of a value of JSON."""
    return next(kind for type_, kind in _TYPES if isinstance(value, type_))


def resolved(schema: object, root: dict[str, Any]) -> object:
    """Follow references within `root`; a schema that is not found is true, which allows anything."""
    for _ in range(_MAX_STEPS):
        if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str)):
            return schema
        schema = _at(schema["$ref"], root)
    return True


def kinds_of(schema: object, root: dict[str, Any]) -> Kinds:
    """Return the types of the values that `schema`, a part of `root`, allows."""
    return _kinds_of(schema, root, _MAX_STEPS)


def _kinds_of(schema: object, root: dict[str, Any], num_steps: int) -> Kinds:
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or not num_steps:
        return None
    if "const" in schema:
        return frozenset({kind_of(schema["const"])})
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return frozenset(map(kind_of, schema["enum"]))
    types = schema.get("type")
    if isinstance(types, str | list):
        named = [types] if isinstance(types, str) else types
        return frozenset("number" if one == "integer" else str(one) for one in named)
    for key in ("anyOf", "oneOf"):
        if isinstance(some := schema.get(key), list):
            return _union(_kinds_of(one, root, num_steps - 1) for one in some)
    if isinstance(some := schema.get("allOf"), list):
        found = [_kinds_of(one, root, num_steps - 1) for one in some]
        return next((kinds for kinds in found if kinds is not None), None)
    return _implied(schema)


def _implied(schema: dict[str, Any]) -> Kinds:
    """The type that a keyword is for."""
    if "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else None


def _union(several: Iterable[Kinds]) -> Kinds:
    union: set[str] = set()
    for kinds in several:
        if kinds is None:
            return None
        union |= kinds
    return frozenset(union)


def _at(reference: str, root: dict[str, Any]) -> object:
    if not reference.startswith("#"):
        return True
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or key not in found:
            return True
        found = found[key]
    return found
