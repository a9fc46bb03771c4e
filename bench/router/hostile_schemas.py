"""Schemas of hostile shapes, whose parts refer to or hold together with many others."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import orjson

from millrace_router.request.grammar import MAX_SOURCE_BYTES


def largest(make: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """The largest schema of this shape that fits the size limit."""
    sizes = range(1, 20_000)
    index = bisect_left(sizes, MAX_SOURCE_BYTES, key=lambda size: len(orjson.dumps(make(size))))
    return make(sizes[index] - 1)


def names(count: int, schema: dict[str, Any], prefix: str = "p") -> dict[str, Any]:
    return {f"{prefix}{index}": schema for index in range(count)}


def constant(**values: int) -> dict[str, Any]:
    return {
        "properties": {name: {"const": value} for name, value in values.items()},
        "required": list(values),
    }


SHAPES: dict[str, Callable[[int], dict[str, Any]]] = {
    "one of many types": lambda n: {"oneOf": [{"type": str(one)} for one in range(n)]},
    "one of many constants": lambda n: {"oneOf": [constant(a=one) for one in range(n)]},
    "one of pairs of constants": lambda n: {
        "oneOf": [constant(a=one // 30, b=one % 30) for one in range(n)]
    },
    "one of two by many": lambda n: {
        "$defs": {name: {"properties": names(n, {"const": 1})} for name in "ab"},
        "properties": names(n, {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}),
    },
    "many that hold with many": lambda n: {
        "$defs": {"a": {"allOf": [{"properties": {f"p{one}": {}}} for one in range(n)]}},
        "properties": names(n, {"$ref": "#/$defs/a", "properties": {"x": {}}}),
    },
    "many with one long reference": lambda n: {
        "$defs": {"a": {"$ref": "#" + "/a" * (10 * n), "properties": {"z": {}}}},
        "properties": names(n, {"$ref": "#/$defs/a", "properties": {}}),
    },
    "a chain of references": lambda n: {
        "$defs": {
            f"d{one}": {"$ref": f"#/$defs/d{one + 1}", "properties": {"a": {}}} for one in range(n)
        }
    },
    "deep": lambda n: {"allOf": [orjson.loads('{"allOf":[' * 50 + "{}" + "]}" * 50)] * n},
    "types of a tree of references": lambda n: {
        "$defs": {
            **{
                f"d{one}": {"anyOf": [{"$ref": f"#/$defs/d{one + 1}"}] * (n // 9 + 1)}
                for one in range(9)
            },
            "d9": {"type": "integer"},
        },
        "properties": {"a": {"$ref": "#/$defs/d0"}},
    },
    "types of many references": lambda n: {
        "$defs": {"d": {"anyOf": [{"type": "integer"}] * n}},
        "properties": names(n, {"$ref": "#/$defs/d"}),
    },
    "many with all definitions": lambda n: {
        "$defs": names(n, {"type": "integer"}),
        "properties": names(n, {"type": "array", "items": {"$ref": "#/$defs/p0"}}),
    },
}
"""Schemas of a size, by the name of their shape."""
