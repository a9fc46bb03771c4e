"""The JSON schema of a call's arguments, in the form that the shards' grammars take."""

from __future__ import annotations

import re
from typing import Any

from millrace_router.errors import ToolError
from millrace_router.request.grammar import checked_schema
from millrace_router.tool_calls.tool import Tool

Schema = dict[str, Any]

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
_ONE = ("additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames")
_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_NOT_REGULAR = re.compile(r"\(\?<?[=!]|\\[1-9k]")
"""Look-around and back-references, which shards do not support."""


def arguments_schema(tool: Tool) -> Schema:
    """Return the schema for `%json`. Only listed properties are allowed unless it says otherwise, as in TGI.

    Raises:
        ToolError: the parameters do not describe an object.
        ValidationError: they are nested too deeply.

    """
    schema = _without_annotations(checked_schema(tool.parameters), keeps_all=tool.strict)
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise ToolError(f"the parameters of `{tool.name}` have to describe an object")
    if not schema.keys() & {"$ref", "allOf"} or "type" in schema:
        schema["type"] = "object"
    return {**schema, "x-guidance": SPACING if tool.strict else {**SPACING, **LENIENT}}


def _without_annotations(schema: Schema, *, keeps_all: bool) -> Schema:
    """`schema` without annotations and, unless `keeps_all`, without patterns that shards do not support."""

    def of(value: object) -> object:
        if isinstance(value, dict):
            return _without_annotations(value, keeps_all=keeps_all)
        return value

    changed = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    pattern = changed.get("pattern")
    if not keeps_all and isinstance(pattern, str) and _NOT_REGULAR.search(pattern):
        del changed["pattern"]
    for name in _ONE:
        if name in changed:
            changed[name] = of(changed[name])
    for name in _SEVERAL:
        if isinstance(some := changed.get(name), list):
            changed[name] = [of(one) for one in some]
    for name in _NAMED:
        if isinstance(some := changed.get(name), dict):
            changed[name] = {key: of(one) for key, one in some.items()}
    return changed
