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
from collections.abc import Set as AbstractSet
from typing import Any, TypeGuard
from urllib.parse import quote

from millrace_shard.structured_output.references import (
    MAPS,
    MAX_DEPTH,
    References,
    Schema,
    subschemas,
)
from millrace_shard.structured_output.unevaluated import mend_unevaluated

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


SPACING = {"item_separator": ",[ ]?", "key_separator": ":[ ]?", "whitespace_flexible": False}
"""At most one space after a comma or colon and no other whitespace, so that weak models cannot generate it forever."""
MAX_EXACT = 2**53
"""Largest magnitude below which doubles distinguish all integers."""
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
"""pydantic's pattern of a `Decimal`; look-around is not supported."""
PLAIN_DECIMAL = r"^[+-]?(\d+\.?\d*|\.\d+)$"
"""The same texts."""
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
    **{
        f"uuid{version}": ({"pattern": f"^.{{14}}{version}.{{4}}[89abAB]"},)
        for version in range(1, 9)
    },
}
"""The parts of formats that llguidance does not enforce."""
ENFORCED = frozenset(
    (
        *(
            "date-time",
            "time",
            "date",
            "duration",
            "email",
            "hostname",
            "ipv4",
            "ipv6",
            "uuid",
            "uri",
        ),
        *FORMATS,
    )
)
"""All other formats are annotations, as the standard says."""
UUIDS = frozenset(f"uuid{version}" for version in range(1, 9))
"""pydantic's formats."""
NAME_ANNOTATIONS = frozenset(("type", "title", "description", "default", "examples", "$schema"))
"""Keywords of `propertyNames` that allow all names."""
NAME_PATTERNS: dict[str, str] = {
    "uuid": "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "date": f"{REAL_DAY}$",
}
"""Formats of names."""
OBJECT_WORDS = ("properties", "patternProperties", "additionalProperties")
DRAFT = re.compile(r"https?://json-schema\.org/(draft-0[3467]|draft/20(?:19-09|20-12))/schema#?")
"""A version of JSON Schema, with whatever scheme."""
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
    references = References(schema)
    mend_unevaluated(parts, references)
    for part in parts:
        _mend_dialect(part)
        _mend(part)
        _mend_format(part)
    for pointer, part in placed:
        _mend_names(part, references)
        _mend_choice(part, references)
        _mend_order(part)
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
    if part.get("pattern") == DECIMAL:
        part["pattern"] = PLAIN_DECIMAL
    if "contains" not in part:
        part.pop("minContains", None)
        part.pop("maxContains", None)
    for name in COUNTS:
        value = part.get(name)
        if isinstance(value, float) and value.is_integer():
            part[name] = int(value)


def _mend_dialect(part: Schema) -> None:
    """Write the address of a version as llguidance knows it, and remove one that names no version."""
    named = part.get("$schema")
    if isinstance(named, str):
        version = DRAFT.fullmatch(named)
        if version is None:
            del part["$schema"]
        else:
            scheme = "https" if "/" in version[1] else "http"
            part["$schema"] = f"{scheme}://json-schema.org/{version[1]}/schema"


def _mend_format(part: Schema) -> None:
    """Add what llguidance does not enforce of a format, and remove a format that it does not know."""
    name, others = part.get("format"), part.get("allOf", [])
    if not isinstance(name, str):
        return
    if name in FORMATS and isinstance(others, list):
        part["allOf"] = [*others, *map(dict, FORMATS[name])]
        part["format"] = "uuid" if name in UUIDS else name
    elif name not in ENFORCED:
        del part["format"]


def _mend_names(part: Schema, references: References) -> None:
    """Write `propertyNames` as properties or as patterns, which llguidance knows; one that allows all names goes."""
    if "propertyNames" not in part:
        return
    names = references.resolved(part["propertyNames"])
    names = {} if names is True else names
    listed, others = part.get("properties", {}), part.get("additionalProperties", True)
    if not isinstance(names, dict) or part.get("patternProperties") or not isinstance(listed, dict):
        return
    if "string" not in names.get("type", "string"):
        return
    rules = names.keys() - NAME_ANNOTATIONS
    values = [names["const"]] if "const" in names else names.get("enum")
    if not rules:
        del part["propertyNames"]
    elif isinstance(values, list) and rules <= {"const", "enum"}:
        allowed = [value for value in values if isinstance(value, str)]
        part["properties"] = {name: listed.get(name, others) for name in allowed}
        part["additionalProperties"] = False
        del part["propertyNames"]
    elif not listed and (pattern := _pattern_of(names, rules)) is not None:
        part["patternProperties"] = {pattern: others}
        part["additionalProperties"] = False
        del part["propertyNames"]


def _pattern_of(names: Schema, rules: AbstractSet[str]) -> str | None:
    """The pattern of `names`, which have `rules`; None if it takes more than one."""
    if rules == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"]
    if rules == {"format"}:
        return NAME_PATTERNS.get(names["format"]) if isinstance(names["format"], str) else None
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if (
        rules <= {"minLength", "maxLength"}
        and isinstance(least, int)
        and isinstance(most, int | str)
    ):
        return f"^(?s:.{{{least},{most}}})$"
    return None


def _mend_choice(part: Schema, references: References) -> None:
    """Write `oneOf` as `anyOf` where each option is a list of plain values, and no value is in two of them."""
    options = part.get("oneOf")
    if not isinstance(options, list) or "anyOf" in part:
        return
    values: list[str] = []
    for option in map(references.resolved, options):
        listed = option.get("enum") if isinstance(option, dict) else None
        if isinstance(option, dict) and "const" in option:
            listed = [option["const"]]
        if not isinstance(listed, list) or any(isinstance(one, list | dict) for one in listed):
            return
        values += {_key(value) for value in listed}
    if len(set(values)) == len(values):
        part["anyOf"] = part.pop("oneOf")


def _key(value: object) -> str:
    """A text that equal values share, 1 and 1.0 among them."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value)


def _mend_order(part: Schema) -> None:
    """Put the keywords of an object side by side: with `allOf` between them llguidance lets no pattern count."""
    words: list[str] = [word for word in OBJECT_WORDS if word in part]
    if "patternProperties" not in words or len(words) == 1:
        return
    group = {word: part[word] for word in words}
    ordered: Schema = {}
    for key, value in part.items():
        ordered |= group if key == words[0] else {key: value} if key not in group else {}
    part.clear()
    part |= ordered


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
