"""Schemas as they are meant: with the types that clients leave out, and with closed objects.

In JSON Schema `{"properties": …}` also matches any number or string, and a model may choose one; and it allows
properties of any name, and a weak model invents them until its answer is cut. TGI generates an object with only the
listed properties, and so do OpenAI and xgrammar. Whatever a closed schema allows, the open one allows, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import combinations
from typing import Any

import orjson

Schema = dict[str, Any]

WORDS = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
"""A schema with one of these defines what other properties there may be."""
_ONE = frozenset(
    {"additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames"}
)
_SEVERAL = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_BRANCHES = ("allOf", "anyOf", "oneOf")
_DECIDING = frozenset({"type", "$ref", "$dynamicRef", "enum", "const"})
"""A schema with one of these keys gets no implied type."""
_NEGATED = frozenset({"not", "if"})
_NOT_CLOSED = _NEGATED | {"then", "else", "dependentSchemas"}


def map_subschemas(
    schema: Schema, change: Callable[[Schema], Schema], *, skipped: Collection[str] = ()
) -> Schema:
    """Return a copy of `schema` in which `change` has replaced each schema directly within it.

    Schemas under the keywords in `skipped`, and values that are not objects, stay as they are.
    """

    def of(value: object) -> object:
        return change(value) if isinstance(value, dict) else value

    changed = dict(schema)
    for key, value in schema.items():
        if key in skipped:
            continue
        if isinstance(value, dict) and key in _NAMED:
            changed[key] = {name: of(one) for name, one in value.items()}
        elif isinstance(value, list) and key in _SEVERAL:
            changed[key] = [of(one) for one in value]
        elif key in _ONE:
            changed[key] = of(value)
    return changed


def subschemas(schema: Schema, *, skipped: Collection[str] = ()) -> Iterator[Schema]:
    """Iterate over the schemas directly within `schema`, as `map_subschemas` finds them."""
    parts: list[Schema] = []

    def keep(part: Schema) -> Schema:
        parts.append(part)
        return part

    map_subschemas(schema, keep, skipped=skipped)
    return iter(parts)


def referenced(reference: object, root: Schema) -> object:
    """Return what `#/a/b` names in `root`; None if there is nothing."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    part: object = root
    for name in reference.removeprefix("#").split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        part = part.get(key) if isinstance(part, dict) else None
    return part


def with_implied_types(schema: Schema) -> Schema:
    """Return `schema` with `type: object` wherever there are `properties` and no key of `_DECIDING`.

    Schemas under `not` and `if` stay as they are, because a type would change their meaning. So do the schemas of a
    `oneOf` with others that match more than objects: a string that matches one of those would match a different number
    of schemas.
    """
    changed = map_subschemas(schema, with_implied_types, skipped=_NEGATED)
    options = changed.get("oneOf")
    if isinstance(options, list) and not all(
        isinstance(one, dict) and one.get("type") == "object" for one in options
    ):
        changed["oneOf"] = schema["oneOf"]
    if isinstance(schema.get("properties"), dict) and not schema.keys() & _DECIDING:
        changed["type"] = "object"
    return changed


def with_closed_objects(schema: Schema) -> Schema:
    """Return `schema` with `additionalProperties: false` at objects that list properties, at every level.

    Schemas that hold together, such as an `allOf`'s, are closed as one: with the properties of all of them.
    Schemas under `not` and `if` stay as they are. So do options of a `oneOf` that no required constant distinguishes:
    what is closed off from one of them would match another one.
    """
    closer = _Closer(schema)
    closer.find_composed()
    return closer.closed(schema)


class _Closer:
    """Closes the schemas of one document."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._open: set[int] = set()
        """Ids of schemas that are closed with others, or not at all."""

    def find_composed(self) -> None:
        """Find the schemas that hold together with others, or that no constant distinguishes."""
        waiting = [self._root]
        while waiting:
            one = waiting.pop()
            if _is_composed(one) or not self._tells_apart(one.get("oneOf")):
                parts = self._parts(one)
                self._open.update(id(part) for part in parts[1:])
            waiting += subschemas(one, skipped=_NOT_CLOSED)

    def closed(self, schema: Schema) -> Schema:
        """Return a copy of `schema`, with closed objects."""
        changed = map_subschemas(schema, self.closed, skipped=_NOT_CLOSED)
        if id(schema) not in self._open:
            self._close(schema, changed)
        return changed

    def _close(self, schema: Schema, changed: Schema) -> None:
        """Close `changed`, the copy of `schema`, if it lists properties and leaves others open."""
        composed = _is_composed(schema)
        if not composed and not isinstance(schema.get("properties"), dict):
            return
        parts = self._parts(schema) if composed else [schema]
        if any(part.keys() & WORDS for part in parts):
            return
        listed = [name for part in parts for name in _names(part)]
        least = schema.get("minProperties")
        if not any(isinstance(part.get("properties"), dict) for part in parts) or (
            isinstance(least, int) and least > len(set(listed))
        ):
            return
        own = changed.get("properties")
        properties = dict(own) if isinstance(own, dict) else {}
        changed["properties"] = {
            **properties,
            **{name: {} for name in listed if name not in properties},
        }
        changed["additionalProperties"] = False

    def _parts(self, schema: Schema) -> list[Schema]:
        """Return `schema` and the schemas that hold for the same value, those behind references among them."""
        parts, seen = list[Schema](), set[int]()
        waiting: list[object] = [schema]
        while waiting:
            one = waiting.pop()
            if not isinstance(one, dict) or id(one) in seen:
                continue
            seen.add(id(one))
            parts.append(one)
            for name in _BRANCHES:
                some = one.get(name)
                waiting += some if isinstance(some, list) else []
            if "$ref" in one:
                waiting.append(self._target(one["$ref"]))
        return parts

    def _target(self, reference: object) -> Schema:
        """Return the schema that a reference names; one that leads nowhere speaks of further properties."""
        target = referenced(reference, self._root)
        return target if isinstance(target, dict) else {"additionalProperties": True}

    def _tells_apart(self, options: object) -> bool:
        """Return whether no value matches two of the options of a `oneOf`."""
        if not isinstance(options, list):
            return True
        resolved = [self._resolved(option) for option in options]
        return all(_is_apart(one, other) for one, other in combinations(resolved, 2))

    def _resolved(self, option: object) -> object:
        if isinstance(option, dict) and "$ref" in option and "properties" not in option:
            return self._target(option["$ref"])
        return option


def _is_composed(schema: Schema) -> bool:
    """Return whether several schemas hold for one value."""
    all_of = schema.get("allOf")
    num_parts = len(all_of) if isinstance(all_of, list) else 0
    num_parts += sum(isinstance(schema.get(name), list) for name in ("anyOf", "oneOf"))
    return num_parts + ("$ref" in schema) + isinstance(schema.get("properties"), dict) > 1


def _names(schema: Schema) -> list[str]:
    """Return the properties that `schema` lists, and those that it requires."""
    properties, required = schema.get("properties"), schema.get("required")
    listed = list(properties) if isinstance(properties, dict) else []
    return listed + ([str(name) for name in required] if isinstance(required, list) else [])


def _is_apart(one: object, other: object) -> bool:
    """Return whether no value matches both: they have other types, or a required property with other constants."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return False
    kinds = one.get("type"), other.get("type")
    if all(isinstance(kind, str) for kind in kinds) and kinds[0] != kinds[1]:
        return set(kinds) != {"integer", "number"}
    mine, theirs = _constants(one), _constants(other)
    return any(not mine[name] & theirs[name] for name in mine.keys() & theirs.keys())


def _constants(schema: Schema) -> dict[str, set[bytes]]:
    """Return the values of each required property that has only constants."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    constants = {}
    for name in required:
        of = properties.get(name) if isinstance(name, str) else None
        values = _values(of)
        if values is not None:
            constants[name] = {orjson.dumps(value) for value in values}
    return constants


def _values(schema: object) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None
