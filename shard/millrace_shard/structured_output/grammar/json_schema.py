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
from urllib.parse import quote

from millrace_shard.structured_output.grammar.json_escapes import allowed_escapes
from millrace_shard.structured_output.grammar.schema_references import MAPS, References, subschemas

Schema = dict[str, Any]

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
"""Users write names in references without escapes, such as `#/$defs/Page[é]`, which is no URI (RFC 3986)."""
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
    # Users may not set options of llguidance, and `x-guidance` is no keyword of JSON Schema.
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
            "control characters are not supported where names that are not listed are allowed beside others"
        )
    _move_bounds(parts)
    for place, part in placed:
        _mend(part)
        _check(part, place)
    references = References(schema)
    if (uri := references.loop()) is not None:
        raise SchemaInvalid(f"`$ref` {uri!r} refers to itself without going into a value")
    if not references.is_productive(schema):
        raise SchemaInvalid("no finite JSON matches the schema")
    _prune(parts, references)
    return escapes


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _parts(schema: Schema) -> list[tuple[str, Schema]]:
    """Every schema that is an object, with its path: those within `schema` and those that references lead to."""
    parts = list(_parts_within(schema, "#"))
    known = {id(part) for _, part in parts}
    for uri, target in References(schema).targets.items():
        for place, part in _parts_within(target, uri):
            if id(part) not in known:
                known.add(id(part))
                parts.append((place, part))
    return parts


def _parts_within(schema: object, path: str) -> Iterator[tuple[str, Schema]]:
    waiting: list[tuple[str, Any, int]] = [(path, schema, 0)]
    while waiting:
        place, part, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise SchemaInvalid(f"schemas may be nested {MAX_DEPTH} deep")
        if isinstance(part, dict):
            yield place, part
            waiting += [(f"{place}/{path}", sub, depth + 1) for path, sub in subschemas(part)]


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
    """Whether `value` is a number that is not refused."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -MAX_EXACT <= value <= MAX_EXACT


def _check(part: Schema, place: str) -> None:
    for name in NUMBERS:
        _check_number(part.get(name), f"{place}/{name}")
    if "const" in part:
        _check_constant(part["const"], f"{place}/const")
    values = part.get("enum", [])
    if isinstance(values, list):
        for value in values:
            _check_constant(value, f"{place}/enum")
    for name in MAPS:
        if name in part and not isinstance(part[name], dict):
            raise SchemaInvalid(f"{place}/{name} has to be an object")
    if _counts_duplicates(part):
        raise SchemaInvalid(
            f"{place}: `minProperties` above 1 is not supported where `additionalProperties` or"
            " `patternProperties` allow names that are not listed, as one may come twice"
        )


def _check_number(value: object, place: str) -> None:
    if isinstance(value, int | float) and not -MAX_EXACT <= value <= MAX_EXACT:
        raise SchemaInvalid(f"{place}: numbers beyond 2**53 are not supported")


def _check_constant(value: object, place: str) -> None:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        _check_number(each, place)
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
