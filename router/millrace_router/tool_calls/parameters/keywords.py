"""The check of the keywords that grammars of single parameters read."""

from __future__ import annotations

from typing import Any

from millrace_router.errors import ToolError

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})


def check_keywords(schema: dict[str, Any]) -> None:
    """Raise ToolError for a keyword whose value JSON Schema does not allow; parts of `schema` are not looked at."""
    for name in _COUNTS:
        if name in schema and not _is_count(schema[name]):
            raise ToolError(f"`{name}` in the parameters is no count")
    types = schema.get("type", [])
    if not (isinstance(types, str) or _are_strings(types)) or not _TYPES.issuperset(
        [types] if isinstance(types, str) else types
    ):
        raise ToolError("`type` in the parameters is none of JSON Schema")
    if not isinstance(schema.get("enum", []), list):
        raise ToolError("`enum` in the parameters is no list")
    if not _are_strings(schema.get("required", [])):
        raise ToolError("`required` in the parameters is no list of names")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)
