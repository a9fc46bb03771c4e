"""Parameters of a tool: the schema of all in the form that the shards take, and their types and schemas one by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import unquote

import orjson

from millrace_router.errors import ToolError
from millrace_router.request.grammar import checked_schema
from millrace_router.request.schemas import Schema, map_subschemas, referenced
from millrace_router.tool_calls.tool import Tool

SPACING: Schema = {
    "item_separator": ",[ ]?",
    "key_separator": ":[ ]?",
    "whitespace_flexible": False,
    "json_allowed_escapes": 'nrbtf\\"',
}
"""At most one space after a comma or a colon, and no escapes that could repeat a property under another spelling."""
LENIENT: Schema = {"lenient": True, "coerce_one_of": True}
"""For tools that are not strict: unsupported keywords are ignored instead of refused."""

_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly", "writeOnly"}
)  # fmt: skip
_NOT_REGULAR = re.compile(r"\(\?<?[=!]|\\[1-9k]|\A/.*/[a-z]*\Z", re.DOTALL)
"""Look-around and back-references, which shards do not support, and expressions between JavaScript's slashes."""


def arguments_schema(tool: Tool) -> Schema:
    """Return the schema for `%json`. Only listed properties are allowed unless it allows others, as in TGI.

    Raises:
        ToolError: the parameters do not describe an object.
        ValidationError: they are nested too deeply.

    """
    schema = checked_schema(tool.parameters)
    schema = _without_annotations(schema if tool.strict else _mended(schema, schema))
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise ToolError(f"the parameters of `{tool.name}` have to describe an object")
    if not schema.keys() & {"$ref", "allOf"} or "type" in schema:
        schema["type"] = "object"
    return {**schema, "x-guidance": SPACING if tool.strict else {**SPACING, **LENIENT}}


def _without_annotations(schema: Schema) -> Schema:
    changed = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    return map_subschemas(changed, _without_annotations)


_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_OTHER_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("str", "text"), "string"),
    **dict.fromkeys(("int", "long"), "integer"),
    **dict.fromkeys(("float", "double", "decimal"), "number"),
    "bool": "boolean",
    **dict.fromkeys(("list", "tuple", "set"), "array"),
    **dict.fromkeys(("dict", "map", "struct"), "object"),
    **dict.fromkeys(("none", "nil"), "null"),
}
"""Names of types in programming languages, in lower case."""


def _mended(schema: Schema, root: Schema) -> Schema:
    """`schema`, a part of `root`, without what cannot be compiled: it is for tools that are not strict."""
    changed = {key: value for key, value in schema.items() if _can_compile(key, value, root)}
    if "type" in changed:
        types = changed["type"] if isinstance(changed["type"], list) else [changed["type"]]
        known = [kind for one in types if (kind := _type_of(one)) is not None]
        changed["type"] = known[0] if len(known) == 1 else known
        if len(known) < len(types):
            del changed["type"]
    return map_subschemas(changed, partial(_mended, root=root))


def _type_of(name: object) -> str | None:
    lower = name.lower() if isinstance(name, str) else ""
    return lower if lower in _TYPES else _OTHER_TYPES.get(lower)


def _can_compile(key: str, value: object, root: Schema) -> bool:
    """Return whether JSON Schema allows the keyword this value, and shards support it."""
    if key == "$ref":
        return isinstance(value, str) and referenced(unquote(value), root) is not None
    is_right = _RIGHT.get(key)
    return is_right is None or is_right(value)


def _are_schemas(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict | bool) for one in value)


def _has_schemas(value: object) -> bool:
    return isinstance(value, dict) and _are_schemas(list(value.values()))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_whole_count(value: object) -> bool:
    return _is_count(value) or (isinstance(value, float) and value >= 0 and value.is_integer())


def _are_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


_RIGHT: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(_COUNTS, _is_whole_count),
    **dict.fromkeys(_BOUNDS, _is_number),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), _has_schemas),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), _are_schemas),
    **dict.fromkeys(
        ("items", "additionalProperties"), lambda value: isinstance(value, dict | bool | list)
    ),
    "required": _are_strings,
    "format": lambda value: isinstance(value, str),
    "enum": lambda value: isinstance(value, list) and bool(value),
    "pattern": lambda value: isinstance(value, str) and not _NOT_REGULAR.search(value),
}
"""Whether a keyword has a value of its type."""


def check_keywords(schema: dict[str, Any]) -> None:
    """Raise ToolError for a keyword whose value JSON Schema does not allow; parts of `schema` are not looked at."""
    for name in _COUNTS:
        if name in schema and not _is_count(schema[name]):
            raise ToolError(f"`{name}` in the parameters must be a count")
    types = schema.get("type", [])
    if not (isinstance(types, str) or _are_strings(types)) or not _TYPES.issuperset(
        [types] if isinstance(types, str) else types
    ):
        raise ToolError("`type` in the parameters must be a type of JSON Schema")
    if not isinstance(schema.get("enum", []), list):
        raise ToolError("`enum` in the parameters must be a list")
    if not _are_strings(schema.get("required", [])):
        raise ToolError("`required` in the parameters must be a list of names")


Kinds = frozenset[str] | None
"""Names of JSON Schema's types, `integer` as `number`; None if the schema leaves them open."""
_MAX_STEPS = 8
_TYPE_NAMES: tuple[tuple[type, str], ...] = (
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
    return next(kind for type_, kind in _TYPE_NAMES if isinstance(value, type_))


def resolved(schema: object, root: dict[str, Any]) -> object:
    """Follow references within `root`; a schema that is not found is true, which allows anything."""
    for _ in range(_MAX_STEPS):
        if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str)):
            return schema
        schema = referenced(schema["$ref"], root)
        schema = True if schema is None else schema
    return True


KindsById = dict[tuple[int, int], Kinds]
"""Types by the id of a schema, and by the steps that were left."""


def kinds_of(schema: object, root: dict[str, Any], known: KindsById) -> Kinds:
    """Return the types of the values that `schema`, a part of `root`, allows.

    `known` belongs to `root`: each schema is looked at once, however many refer to it.
    """
    return _kinds_of(schema, root, _MAX_STEPS, known)


def _kinds_of(schema: object, root: dict[str, Any], num_steps: int, known: KindsById) -> Kinds:
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or not num_steps:
        return None
    key = id(schema), num_steps
    if key not in known:
        known[key] = _kinds_of_dict(schema, root, num_steps, known)
    return known[key]


def _kinds_of_dict(
    schema: dict[str, Any], root: dict[str, Any], num_steps: int, known: KindsById
) -> Kinds:
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
            return _union(_kinds_of(one, root, num_steps - 1, known) for one in some)
    if isinstance(some := schema.get("allOf"), list):
        options = (_kinds_of(one, root, num_steps - 1, known) for one in some)
        return next((kinds for kinds in options if kinds is not None), None)
    return _implied(schema)


def _implied(schema: dict[str, Any]) -> Kinds:
    """Return the type that a keyword is for."""
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


_COMPOSED = (
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "if",
    "patternProperties",
    "propertyNames",
    "dependentSchemas",
    "dependentRequired",
    "minProperties",
    "maxProperties",
    "unevaluatedProperties",
)
"""Keywords that define more of an object than each property."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSchema:
    """An object's properties in their order."""

    properties: dict[str, object]
    required: frozenset[str]
    extra: object
    """The schema of further properties; False for none."""

    @classmethod
    def of(cls, schema: object, root: Schema, *, strict: bool) -> ObjectSchema:
        """Read a schema within `root`.

        Raises:
            ToolError: it is malformed; or `strict`, and it has rules that single parameters cannot keep.

        """
        schema = resolved(schema, root)
        if not isinstance(schema, dict):
            return cls(properties={}, required=frozenset(), extra=schema)
        check_keywords(schema)
        kept = [key for key in _COMPOSED if key in schema]
        if kept and strict:
            raise ToolError(f"this model's format cannot keep `{kept[0]}` of an object")
        value = schema.get("properties")
        properties: dict[str, object] = value if isinstance(value, dict) else {}
        needed = schema.get("required")
        required = frozenset(needed if isinstance(needed, list) else ())
        extra = schema.get("additionalProperties", not properties or bool(kept))
        if kept and extra is False:
            extra = True
        listed = {name: properties.get(name, True) for name in [*properties, *sorted(required)]}
        return cls(properties=listed, required=required, extra=extra)


def schema_of(tool: Tool) -> Schema:
    """Return the schema of all arguments; raises as `arguments_schema` does."""
    schema = arguments_schema(tool)
    del schema["x-guidance"]
    return schema


def within(schema: object, root: Schema, *, strict: bool) -> Schema:
    """Return a part of `root` as a complete schema, for `%json`."""
    part: dict[str, Any] = dict(schema) if isinstance(schema, dict) else {}
    definitions: Schema = {}
    if b'"$ref"' in orjson.dumps(part):
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    guidance = SPACING if strict else {**SPACING, **LENIENT}
    return {**definitions, **part, "x-guidance": guidance}
