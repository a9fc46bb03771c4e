"""The arguments of a tool as single parameters, for grammars that write each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millrace_router.errors import ToolError
from millrace_router.tool_calls.arguments_schema import LENIENT, SPACING, Schema, arguments_schema
from millrace_router.tool_calls.parameters.keywords import check_keywords
from millrace_router.tool_calls.parameters.kinds import resolved
from millrace_router.tool_calls.tool import Tool

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
"""Keywords that say more of an object than what each property is."""


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
            ToolError: it is malformed; or `strict`, and it says what single parameters cannot keep.

        """
        schema = resolved(schema, root)
        if not isinstance(schema, dict):
            return cls(properties={}, required=frozenset(), extra=schema)
        check_keywords(schema)
        kept = [key for key in _COMPOSED if key in schema]
        if kept and strict:
            raise ToolError(f"this model's format cannot keep `{kept[0]}` of an object")
        found = schema.get("properties")
        properties: dict[str, object] = found if isinstance(found, dict) else {}
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
    """Return a part of `root` as a schema of its own, for `%json`."""
    definitions: Schema = {key: root[key] for key in ("$defs", "definitions") if key in root}
    part: dict[str, Any] = dict(schema) if isinstance(schema, dict) else {}
    guidance = SPACING if strict else {**SPACING, **LENIENT}
    return {**definitions, **part, "x-guidance": guidance}
