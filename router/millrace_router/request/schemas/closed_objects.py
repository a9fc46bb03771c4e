"""Closes objects: one with `properties`, and no word on others, has no others.

In JSON Schema `{"properties": …}` allows properties of any name, and a weak model invents them until its answer is cut.
TGI, OpenAI and xgrammar generate the listed ones alone. Whatever a closed schema allows, the open one allows, too.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import orjson

Schema = dict[str, Any]

WORDS = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
"""A schema with one of these says what other properties there may be."""
_ONE = ("additionalProperties", "items", "contains", "propertyNames")
_SEVERAL = ("prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_BRANCHES = ("allOf", "anyOf", "oneOf")


def with_closed_objects(schema: Schema) -> Schema:
    """Return `schema` with `additionalProperties: false` at objects that list properties, at every level.

    Schemas that hold together, such as those of an `allOf`, are closed as one: with the properties of all of them.
    Schemas under `not` and `if` stay as they are. So do the options of a `oneOf` that no required constant tells apart:
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
        """Find the schemas that hold together with others, or that no constant tells apart."""
        waiting: list[object] = [self._root]
        while waiting:
            one = waiting.pop()
            if not isinstance(one, dict):
                continue
            if _is_composed(one) or not self._tells_apart(one.get("oneOf")):
                parts = self._parts(one)
                self._open.update(id(part) for part in parts[1:])
            waiting += _within(one)

    def closed(self, schema: Schema) -> Schema:
        """Return a copy of `schema`, with closed objects."""
        changed = dict(schema)
        for name in _ONE:
            if name in schema:
                changed[name] = self._closed_if_schema(schema[name])
        for name in (*_SEVERAL, *_BRANCHES):
            if isinstance(some := schema.get(name), list):
                changed[name] = [self._closed_if_schema(one) for one in some]
        for name in _NAMED:
            if isinstance(some := schema.get(name), dict):
                changed[name] = {key: self._closed_if_schema(one) for key, one in some.items()}
        if id(schema) not in self._open:
            self._close(schema, changed)
        return changed

    def _closed_if_schema(self, value: object) -> object:
        return self.closed(value) if isinstance(value, dict) else value

    def _close(self, schema: Schema, changed: Schema) -> None:
        """Close `changed`, the copy of `schema`, if it lists properties and says nothing of others."""
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
        """Return `schema` and the schemas that hold for the same value, those behind references among them.

        A reference that leads nowhere gives a part that speaks of further properties.
        """
        found, known = list[Schema](), set[int]()
        waiting: list[object] = [schema]
        while waiting:
            one = waiting.pop()
            if not isinstance(one, dict) or id(one) in known:
                continue
            known.add(id(one))
            found.append(one)
            for name in _BRANCHES:
                some = one.get(name)
                waiting += some if isinstance(some, list) else []
            if "$ref" in one:
                waiting.append(self._target(one["$ref"]))
        return found

    def _target(self, reference: object) -> Schema:
        """Return what `#/a/b` names."""
        nowhere: Schema = {"additionalProperties": True}
        if not isinstance(reference, str) or not reference.startswith("#"):
            return nowhere
        place: object = self._root
        for name in reference.removeprefix("#").split("/")[1:]:
            key = name.replace("~1", "/").replace("~0", "~")
            place = place.get(key) if isinstance(place, dict) else None
        return place if isinstance(place, dict) else nowhere

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
    """Whether several schemas hold for one value."""
    all_of = schema.get("allOf")
    num_parts = len(all_of) if isinstance(all_of, list) else 0
    num_parts += sum(isinstance(schema.get(name), list) for name in ("anyOf", "oneOf"))
    return num_parts + ("$ref" in schema) + isinstance(schema.get("properties"), dict) > 1


def _within(schema: Schema) -> list[object]:
    """Return the schemas directly within `schema`."""
    found: list[object] = [schema.get(name) for name in _ONE]
    for name in (*_SEVERAL, *_BRANCHES):
        some = schema.get(name)
        found += some if isinstance(some, list) else []
    for name in _NAMED:
        some = schema.get(name)
        found += some.values() if isinstance(some, dict) else ()
    return found


def _names(schema: Schema) -> list[str]:
    """Return the properties that `schema` lists, and those that it requires."""
    properties, required = schema.get("properties"), schema.get("required")
    listed = list(properties) if isinstance(properties, dict) else []
    return listed + ([str(name) for name in required] if isinstance(required, list) else [])


def _is_apart(one: object, other: object) -> bool:
    """Whether no value matches both: they have other types, or a required property with other constants."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return False
    kinds = one.get("type"), other.get("type")
    if all(isinstance(kind, str) for kind in kinds) and kinds[0] != kinds[1]:
        return set(kinds) != {"integer", "number"}
    mine, theirs = _constants(one), _constants(other)
    return any(not mine[name] & theirs[name] for name in mine.keys() & theirs.keys())


def _constants(schema: Schema) -> dict[str, set[bytes]]:
    """Return the values of each required property that has constants alone."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    found = {}
    for name in required:
        of = properties.get(name) if isinstance(name, str) else None
        values = _values(of)
        if values is not None:
            found[name] = {orjson.dumps(value) for value in values}
    return found


def _values(schema: object) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None
