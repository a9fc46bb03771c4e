"""Makes JSON Schemas of users exact, so that llguidance enforces them fully, and refuses those it cannot enforce.

llguidance itself refuses keywords that it does not implement. This module handles what llguidance accepts and does not
enforce: references that never reach a value, so that no finite text matches; duplicate keys, which count twice towards
`minProperties`; listed keys with escapes; numbers that doubles cannot distinguish; excluded integers next to another
bound; leap seconds and the 29th of February in any minute and year; and hostnames of any length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeGuard
from urllib.parse import quote, unquote, urljoin

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


MAX_DEPTH = 64
SPACING = {"item_separator": ",[ ]?", "key_separator": ":[ ]?", "whitespace_flexible": False}
"""At most one space after a comma or colon and no other whitespace, so that weak models cannot generate it forever."""
MAX_EXACT = 2**53
"""Largest magnitude below which doubles distinguish all integers."""
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
REAL_DAY = (
    f"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2])|[0-9]{{4}}-02-(?:[01][0-9]|2[0-8])|{LEAP_YEAR}-02-29)"
)
"""The start of a date, with the 29th of February in leap years only."""
REAL_SECOND = "[0-9]{2}:[0-9]{2}:[0-5]"
"""A time without leap seconds, which few minutes have."""
FORMATS: dict[object, Sequence[Schema]] = {
    "date": ({"pattern": REAL_DAY},),
    "date-time": ({"pattern": REAL_DAY}, {"pattern": f"^.{{11}}{REAL_SECOND}"}),
    "time": ({"pattern": f"^{REAL_SECOND}"},),
    "hostname": ({"maxLength": 253},),
}
"""The parts of formats that llguidance does not enforce."""
IN_URIS = "%/:?@!$&'()*+,;=-._~"
STRAY_PERCENT = re.compile("%(?![0-9A-Fa-f]{2})")
"""Users write names in references without escapes, such as `#/$defs/Page[é]`, which is not a URI (RFC 3986)."""
LEAST_STEP, STEP = 2.0**-40, 2.0**-50
"""The distance from an excluded bound to the next allowed number, absolute and as a share of the bound."""


class SchemaInvalid(ValueError):  # noqa: N818
    """A schema that cannot be enforced; the message names the reason and the place."""


def read_schema(source: str) -> Schema:
    """Parse a schema and make it exact; the result allows the same instances. Raises SchemaInvalid, RecursionError."""
    try:
        schema = json.loads(source, parse_constant=_no_constant)
    except ValueError as error:
        raise SchemaInvalid(f"the schema is not JSON: {error}") from error
    if schema is True:
        return {}
    if schema is False:
        raise SchemaInvalid("the schema `false` allows nothing")
    if not isinstance(schema, dict):
        raise SchemaInvalid("a schema is an object or a boolean")
    # Users may not set options of llguidance, and `x-guidance` is not a keyword of JSON Schema.
    schema.pop("x-guidance", None)
    schema["x-guidance"] = SPACING | {"json_allowed_escapes": make_exact(schema)}
    return schema


def make_exact(schema: Schema) -> str:
    """Change `schema` so that llguidance enforces it; returns the escapes that it may allow.

    Raises SchemaInvalid, RecursionError.
    """
    placed = _parts(schema)
    parts = [part for _, part in placed]
    escapes = allowed_escapes(schema, parts)
    if escapes is None:
        raise SchemaInvalid(
            "control characters are not supported where names that are not listed are allowed as well"
        )
    _move_bounds(parts)
    for pointer, part in placed:
        _mend(part)
        _check(part, pointer)
    references = References(schema)
    if (uri := references.loop()) is not None:
        raise SchemaInvalid(f"`$ref` {uri!r} refers to itself without going into a value")
    if not references.is_productive(schema):
        raise SchemaInvalid("no finite JSON matches the schema")
    _prune(parts, references)
    return escapes


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _parts(schema: Schema) -> list[tuple[str, Schema]]:
    """Every schema that is an object, with its path: those within `schema` and those that references lead to."""
    parts = list(_parts_within(schema, "#"))
    seen = {id(part) for _, part in parts}
    for uri, target in References(schema).targets.items():
        for pointer, part in _parts_within(target, uri):
            if id(part) not in seen:
                seen.add(id(part))
                parts.append((pointer, part))
    return parts


def _parts_within(schema: object, path: str) -> Iterator[tuple[str, Schema]]:
    waiting: list[tuple[str, Any, int]] = [(path, schema, 0)]
    while waiting:
        pointer, part, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise SchemaInvalid(f"schemas may be nested {MAX_DEPTH} deep")
        if isinstance(part, dict):
            yield pointer, part
            waiting += [(f"{pointer}/{path}", sub, depth + 1) for path, sub in subschemas(part)]


def _mend(part: Schema) -> None:
    """Remove keywords without effect, and rewrite those that llguidance interprets differently."""
    if isinstance(uri := part.get("$ref"), str):
        base, mark, name = STRAY_PERCENT.sub("%25", uri).partition("#")
        part["$ref"] = quote(base, safe=IN_URIS) + mark + quote(name, safe=IN_URIS)
    if part.get("uniqueItems") is False:
        del part["uniqueItems"]
    if "if" not in part:
        part.pop("then", None)
        part.pop("else", None)
    elif "then" not in part and "else" not in part:
        del part["if"]
    if "contains" not in part:
        part.pop("minContains", None)
        part.pop("maxContains", None)
    others = part.get("allOf", [])
    if (
        isinstance(part.get("format"), str)
        and part["format"] in FORMATS
        and isinstance(others, list)
    ):
        part["allOf"] = [*others, *map(dict, FORMATS[part["format"]])]
    for name in COUNTS:
        value = part.get(name)
        if isinstance(value, float) and value.is_integer():
            part[name] = int(value)


def _move_bounds(parts: Sequence[Schema]) -> None:
    """Move excluded integer bounds that llguidance would allow because another bound is near."""
    for excluded, other, sign in (
        ("exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1),
        ("exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1),
    ):
        others = [part[name] for part in parts for name in other if _is_number(part.get(name))]
        for part in parts:
            bound = part.get(excluded)
            if (
                _is_number(bound)
                and bound == int(bound)
                and any(abs(each - bound) <= 1 for each in others)
            ):
                part[excluded] = bound + sign * max(LEAST_STEP, STEP * abs(bound))


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -MAX_EXACT <= value <= MAX_EXACT


def _check(part: Schema, pointer: str) -> None:
    for name in NUMBERS:
        _check_number(part.get(name), f"{pointer}/{name}")
    if "const" in part:
        _check_constant(part["const"], f"{pointer}/const")
    values = part.get("enum", [])
    if isinstance(values, list):
        for value in values:
            _check_constant(value, f"{pointer}/enum")
    for name in MAPS:
        if name in part and not isinstance(part[name], dict):
            raise SchemaInvalid(f"{pointer}/{name} has to be an object")
    if _counts_duplicates(part):
        raise SchemaInvalid(
            f"{pointer}: `minProperties` above 1 is not supported where `additionalProperties` or"
            " `patternProperties` allow names that are not listed, as one may come twice"
        )


def _check_number(value: object, pointer: str) -> None:
    if isinstance(value, int | float) and not -MAX_EXACT <= value <= MAX_EXACT:
        raise SchemaInvalid(f"{pointer}: numbers beyond 2**53 are not supported")


def _check_constant(value: object, pointer: str) -> None:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        _check_number(each, pointer)
        if isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def _counts_duplicates(part: Schema) -> bool:
    least = part.get("minProperties")
    if not isinstance(least, int) or least <= 1:
        return False
    required = part.get("required", [])
    if isinstance(required, list) and len(set(map(str, required))) >= least:
        return False
    return part.get("additionalProperties") is not False or bool(part.get("patternProperties"))


def _prune(parts: Iterable[Schema], references: References) -> None:
    """Replace subschemas without finite instances by `false`: a text that enters one would never end."""
    for part in parts:
        for container, key in _slots(part):
            if not references.is_productive(container[key]):
                container[key] = False


def _slots(part: Schema) -> Iterator[tuple[Any, Any]]:
    """Places of the subschemas of `part` that a value need not use."""
    for name in ("properties", "patternProperties"):
        for key in part.get(name, ()):
            yield part[name], key
    for name in ("additionalProperties", "items", "additionalItems"):
        if isinstance(part.get(name), dict):
            yield part, name
    for name in ("prefixItems", "anyOf", "oneOf", "items"):
        if isinstance(part.get(name), list):
            for index in range(len(part[name])):
                yield part[name], index
