"""The schemas within a schema, and where its references lead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urljoin

MAX_DEPTH = 64
TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")
Schema = dict[str, Any]


class References:
    """The references of one schema. Those to other documents count as productive, since llguidance refuses them."""

    def __init__(self, root: Schema) -> None:
        self._resources: dict[str, Schema] = {"": root}
        """Schemas by their `$id`, resolved against the `$id` of enclosing schemas."""
        self._anchors: dict[str, Schema] = {}
        self._bases: dict[int, str] = {}
        """The base URI of references in each schema, by the identity of the schema."""
        self._index(root)
        self.targets: dict[str, object] = {}
        """The target of each reference, by its whole URI."""
        self._collect(root)
        # The least fixed point: a reference that reaches a value in n steps also does so in n + 1.
        self._productive = dict.fromkeys(self.targets, False)
        changed = True
        while changed:
            changed = False
            for uri, is_productive in self._productive.items():
                if not is_productive and self.is_productive(self.targets[uri]):
                    self._productive[uri] = changed = True

    def loop(self) -> str | None:
        """A reference that leads back to itself without entering a value, which JSON Schema leaves undefined."""
        passed: set[str] = set()
        for start in self.targets:
            path: dict[str, Iterator[str]] = {}
            if start not in passed:
                path[start] = self._in_place(self.targets[start])
            while path:
                uri, following = next(reversed(path.items()))
                after = next(following, None)
                if after is None:
                    passed.add(uri)
                    del path[uri]
                elif after in path:
                    return after
                elif after not in passed:
                    path[after] = self._in_place(self.targets[after])
        return None

    def is_productive(self, schema: object) -> bool:
        """Whether a finite value may match `schema`, judged by its references and required parts."""
        if not isinstance(schema, dict):
            return schema is not False
        if schema.get("not") is True or schema.get("not") == {}:
            return False
        uri = self._uri(schema)
        if uri is not None and not self._productive.get(uri, True):
            return False
        if not all(self.is_productive(part) for part in _list(schema, "allOf")):
            return False
        for name in ("anyOf", "oneOf"):
            options = _list(schema, name)
            if options and not any(self.is_productive(option) for option in options):
                return False
        return any(self._allows(type_, schema) for type_ in _types(schema))

    def _allows(self, type_: str, schema: Schema) -> bool:
        if type_ == "object":
            return self._object_ends(schema)
        if type_ == "array":
            return self._array_ends(schema)
        return True

    def _object_ends(self, schema: Schema) -> bool:
        properties = schema.get("properties")
        schemas = properties if isinstance(properties, dict) else {}
        others = True if schema.get("patternProperties") else schema.get("additionalProperties")
        return all(self.is_productive(schemas.get(name, others)) for name in _names(schema))

    def _array_ends(self, schema: Schema) -> bool:
        least = schema.get("minItems", 0)
        if not isinstance(least, int):
            return True
        first = _list(schema, "prefixItems") or _list(schema, "items")
        others = schema.get("items", True)
        needed = first[:least]
        if least > len(first) and isinstance(others, dict | bool):
            needed = [*needed, others]
        return all(self.is_productive(part) for part in needed)

    def resolved(self, schema: object) -> object:
        """What `schema` refers to, if it is a reference within this document."""
        for _ in range(MAX_DEPTH):
            uri = self._uri(schema) if isinstance(schema, dict) else None
            if uri is None:
                break
            schema = self._target(uri)
        return schema

    def target(self, schema: Schema) -> object:
        """What `schema` refers to; True, which allows anything, without a reference or outside this document."""
        uri = self._uri(schema)
        return True if uri is None else self._target(uri)

    def _index(self, root: Schema) -> None:
        waiting: list[tuple[Any, str]] = [(root, "")]
        while waiting:
            part, base = waiting.pop()
            if isinstance(part, dict):
                if isinstance(identifier := part.get("$id"), str):
                    base = urljoin(base, identifier).partition("#")[0]
                    self._resources.setdefault(base, part)
                if isinstance(name := part.get("$anchor"), str):
                    self._anchors[f"{base}#{name}"] = part
                self._bases[id(part)] = base
                waiting += [(sub, base) for _, sub in subschemas(part)]

    def _collect(self, root: Schema) -> None:
        waiting: list[object] = [root]
        while waiting:
            part = waiting.pop()
            if isinstance(part, dict):
                uri = self._uri(part)
                if uri is not None and uri not in self.targets:
                    target = self._target(uri)
                    self.targets[uri] = target
                    waiting.append(target)
                waiting += [sub for _, sub in subschemas(part)]

    def _in_place(self, schema: object) -> Iterator[str]:
        waiting = [schema]
        while waiting:
            part = waiting.pop()
            if isinstance(part, dict):
                uri = self._uri(part)
                if uri is not None:
                    yield uri
                for name in IN_PLACE:
                    waiting += _list(part, name)

    def _uri(self, schema: Schema) -> str | None:
        ref = schema.get("$ref")
        if not isinstance(ref, str):
            return None
        base = self._bases.get(id(schema), "")
        return base + ref if ref.startswith("#") else urljoin(base, ref)

    def _target(self, uri: str) -> object:
        """The schema at `uri`, or True if this document has none."""
        url, _, fragment = uri.partition("#")
        value: Any = self._resources.get(url, True)
        if fragment and not fragment.startswith("/"):
            return self._anchors.get(uri, True)
        for step in fragment.split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            else:
                return True
        return value


def _types(schema: Schema) -> tuple[str, ...]:
    if "const" in schema or "enum" in schema:
        return ("null",)
    kinds = schema.get("type", TYPES)
    if isinstance(kinds, str):
        return (kinds,)
    return (
        tuple(kind for kind in kinds if isinstance(kind, str)) if isinstance(kinds, list) else TYPES
    )


def _names(schema: Schema) -> list[str]:
    return [name for name in _list(schema, "required") if isinstance(name, str)]


def _list(schema: Schema, name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


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
    """The schemas directly within `schema`, with their paths from it; other values are left out."""
    for name, value in schema.items():
        if isinstance(value, list):
            if name in LISTS:
                yield from ((f"{name}/{index}", sub) for index, sub in enumerate(value))
        elif isinstance(value, dict) and name in MAPS:
            yield from ((f"{name}/{key}", sub) for key, sub in value.items())
        elif isinstance(value, dict | bool) and name in SINGLES:
            yield name, value
