"""Schemas as they are meant: with the types that clients leave out, and with closed objects.

In JSON Schema `{"properties": …}` also matches any number or string, and a model may choose one; and it allows
properties of any name, and a weak model invents them until its answer is cut. TGI generates an object with only the
listed properties, and so do OpenAI and xgrammar. Whatever a closed schema allows, the open one allows, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import orjson

from millrace_router.errors import ValidationError

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
        is_never(one) or (isinstance(one, dict) and one.get("type") == "object") for one in options
    ):
        changed["oneOf"] = schema["oneOf"]
    if isinstance(schema.get("properties"), dict) and not schema.keys() & _DECIDING:
        changed["type"] = "object"
    return changed


def is_never(schema: object) -> bool:
    """Return whether nothing matches, as generators write it: `false`, or `{"not": {}}`."""
    if not isinstance(schema, dict):
        return schema is False
    negated = schema.get("not")
    return negated is True or negated == {}


def with_closed_objects(schema: Schema) -> Schema:
    """Return `schema` with `additionalProperties: false` at objects that list properties, at every level.

    Schemas that hold together, such as an `allOf`'s, are closed as one: with the properties of all of them.
    Schemas under `not` and `if` stay as they are. So do options of a `oneOf` that no constant distinguishes: what is
    closed off from one of them would match another one. A property whose constants distinguish them becomes required,
    as OpenAPI demands of a discriminator; pydantic leaves it optional where its literal has a default.

    Raises:
        ValidationError: schemas hold together in so many combinations that this takes more than `MAX_VISITS`.

    """
    closer = Closer(schema)
    closer.find_composed()
    return closer.closed(schema)


MAX_VISITS = 60_000
"""Schemas, names and constants that one schema may have to be looked at for; 0.1 s."""
_ELSEWHERE: Schema = {"additionalProperties": True}
"""Stands for the target of a reference that cannot be resolved; the target might define further properties."""


@dataclass(frozen=True, slots=True)
class _Constants:
    """The constants of the properties that have nothing else."""

    all: dict[str, set[bytes]]
    required: dict[str, set[bytes]]


_NO_CONSTANTS = _Constants({}, {})


class Closer:
    """Closes the schemas of one document."""

    def __init__(self, root: Schema) -> None:
        self.num_visits = 0
        self._root = root
        self._open: set[int] = set()
        """Ids of schemas that are closed with others, or not at all."""
        self._tags: dict[int, list[str]] = {}
        """Names that become required, by the id of their schema."""
        self._targets: dict[str, Schema] = {}
        self._constants: dict[int, _Constants] = {}

    def find_composed(self) -> None:
        """Find the schemas that hold together with others, or that no constant distinguishes."""
        waiting = [self._root]
        while waiting:
            one = waiting.pop()
            if not self._tells_apart(one.get("oneOf")) or _is_composed(one):
                self._open_parts(one)
            waiting += subschemas(one, skipped=_NOT_CLOSED)

    def closed(self, schema: Schema) -> Schema:
        """Return a copy of `schema`, with closed objects."""
        changed = map_subschemas(schema, self.closed, skipped=_NOT_CLOSED)
        if tags := self._tags.get(id(schema)):
            changed["required"] = [*_required(schema), *tags]
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
        self._visit(len(listed) if composed else 0)
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

    def _open_parts(self, schema: Schema) -> None:
        """Note the schemas that hold for the same value as `schema`: each once, whatever refers to it."""
        waiting = self._next_parts(schema)
        while waiting:
            one = waiting.pop()
            if isinstance(one, dict) and one is not schema and id(one) not in self._open:
                self._open.add(id(one))
                waiting += self._next_parts(one)

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
            following = self._next_parts(one)
            self._visit(1 + len(following))
            waiting += following
        return parts

    def _next_parts(self, schema: Schema) -> list[object]:
        """Return the schemas that `schema` demands of the same value."""
        following: list[object] = []
        for name in _BRANCHES:
            some = schema.get(name)
            following += some if isinstance(some, list) else []
        if "$ref" in schema:
            following.append(self._target(schema["$ref"]))
        return following

    def _target(self, reference: object) -> Schema:
        """Return the schema that a reference names; one that leads nowhere speaks of further properties."""
        if not isinstance(reference, str):
            return _ELSEWHERE
        target = self._targets.get(reference)
        if target is None:
            schema = referenced(reference, self._root)
            target = self._targets[reference] = schema if isinstance(schema, dict) else _ELSEWHERE
        return target

    def _tells_apart(self, options: object) -> bool:
        """Return whether no value matches two of the options of a `oneOf`, once their tag is required."""
        if not isinstance(options, list):
            return True
        self._visit(len(options))
        resolved = [self._resolved(option) for option in options if not is_never(option)]
        groups: dict[str | None, list[object]] = {}
        for one in resolved:
            kind = one.get("type") if isinstance(one, dict) else None
            kind = "number" if kind == "integer" else kind
            groups.setdefault(kind if isinstance(kind, str) else None, []).append(one)
        several = [resolved] if None in groups else list(groups.values())
        return all(self._is_group_apart(group) for group in several)

    def _is_group_apart(self, options: list[object]) -> bool:
        """Return whether no value matches two of the options, whose types do not distinguish them all."""
        if len(options) < 2:
            return True
        constants = [self._constants_of(one) for one in options]
        first = constants[0]
        if any(
            self._distinguishes([one.required.get(name) for one in constants])
            for name in first.required
        ):
            return True
        for name in first.all:
            if self._distinguishes([one.all.get(name) for one in constants]):
                self._require(name, options)
                return True
        return all(self._is_apart(one, other) for one, other in combinations(options, 2))

    def _distinguishes(self, several: list[set[bytes] | None]) -> bool:
        """Return whether no two of these sets of constants have one in common; None has any."""
        seen, num_values = set[bytes](), 0
        for values in several:
            if values is None:
                return False
            self._visit(1 + len(values))
            num_values += len(values)
            seen |= values
        return len(seen) == num_values

    def _require(self, name: str, options: list[object]) -> None:
        for one in options:
            if isinstance(one, dict) and name not in _required(one):
                tags = self._tags.setdefault(id(one), [])
                if name not in tags:
                    tags.append(name)

    def _is_apart(self, one: object, other: object) -> bool:
        """Return whether no value matches both: they have other types, or a required property with other constants."""
        self._visit(1)
        if not (isinstance(one, dict) and isinstance(other, dict)):
            return False
        kinds = one.get("type"), other.get("type")
        if all(isinstance(kind, str) for kind in kinds) and kinds[0] != kinds[1]:
            return set(kinds) != {"integer", "number"}
        mine, theirs = self._constants_of(one).required, self._constants_of(other).required
        for name in mine.keys() & theirs.keys():
            self._visit(min(len(mine[name]), len(theirs[name])))
            if mine[name].isdisjoint(theirs[name]):
                return True
        return False

    def _constants_of(self, schema: object) -> _Constants:
        if not isinstance(schema, dict):
            return _NO_CONSTANTS
        constants = self._constants.get(id(schema))
        if constants is None:
            constants = self._constants[id(schema)] = _constants(schema)
        return constants

    def _resolved(self, option: object) -> object:
        if isinstance(option, dict) and "$ref" in option and "properties" not in option:
            return self._target(option["$ref"])
        return option

    def _visit(self, num_visits: int) -> None:
        """Count visits; raises ValidationError for too many."""
        self.num_visits += num_visits
        if self.num_visits > MAX_VISITS:
            raise ValidationError(
                "grammar is not valid: its schemas refer to each other in too many combinations: split `oneOf`, "
                "`allOf` and `$ref` into fewer"
            )


def _is_composed(schema: Schema) -> bool:
    """Return whether several schemas hold for one value."""
    all_of = schema.get("allOf")
    num_parts = len(all_of) if isinstance(all_of, list) else 0
    num_parts += sum(isinstance(schema.get(name), list) for name in ("anyOf", "oneOf"))
    return num_parts + ("$ref" in schema) + isinstance(schema.get("properties"), dict) > 1


def _required(schema: Schema) -> list[Any]:
    required = schema.get("required")
    return required if isinstance(required, list) else []


def _names(schema: Schema) -> list[str]:
    """Return the properties that `schema` lists, and those that it requires."""
    properties = schema.get("properties")
    listed = list(properties) if isinstance(properties, dict) else []
    return listed + [str(name) for name in _required(schema)]


def _constants(schema: Schema) -> _Constants:
    """Return the values of each property that has only constants."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return _NO_CONSTANTS
    constants = {}
    for name, of in properties.items():
        values = _values(of)
        if values is not None:
            constants[name] = {orjson.dumps(value) for value in values}
    names = [name for name in _required(schema) if isinstance(name, str) and name in constants]
    return _Constants(constants, {name: constants[name] for name in names})


def _values(schema: object) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None
