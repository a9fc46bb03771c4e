"""Requests with grammars of the largest allowed size, or beyond the compiler's limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import orjson

from millrace_router.request.grammar import RawGrammar
from millrace_router.request.request import Grammar, GrammarKind
from millrace_router.tool_calls.formats.registry import format_of
from millrace_router.tool_calls.parsing.call_format import chat_grammar
from millrace_router.tool_calls.tool import Tool, ToolChoice

Schema = dict[str, Any]

NUM_BYTES = 125_000
"""Length of the JSON: a little below 128 KiB, the limit of a grammar."""
TOOLS_BYTES, NUM_TOOLS = 112_000, 12
"""Their grammar adds a tenth to them."""
NUM_LEVELS = 64
"""Nested schemas, as many as allowed."""
NUM_PATTERNS = 1000
NEW_TOKENS = 8
MARK = "NUMBER"
"""Placeholder for the number of a request, which makes its grammar new."""
PARTS: Mapping[str, Schema] = {
    "description": {"type": "string"},
    "name": {"type": "string", "maxLength": 64},
    "amount": {"type": "integer", "minimum": 0},
    "colour": {"enum": ["red", "green", "blue"]},
}


@dataclass(frozen=True, slots=True)
class LargeRequest:
    """A request, and the router's way to read its grammar."""

    path: str
    body: bytes
    """Holds MARK."""
    read: Callable[[], Grammar | None]
    """Reads the grammar as the router does."""

    def numbered(self, number: str) -> bytes:
        """The body with the grammar of this number."""
        # Cheap, so that it does not delay the arrival times of tokens.
        return self.body.replace(MARK.encode(), number.encode())


def wide(num_bytes: int = NUM_BYTES) -> Schema:
    """Many objects of a few properties each."""
    return _filled(
        lambda part: _object({f"{name}_of_part_number_{part}": of for name, of in PARTS.items()}),
        num_bytes,
    )


def deep(num_bytes: int = NUM_BYTES) -> Schema:
    """Many objects, nested as deeply as allowed."""

    def chain(part: int) -> Schema:
        schema: Schema = {"type": "integer"}
        for level in range(NUM_LEVELS - 2):
            schema = _object({f"level_{level}_of_the_nested_objects_of_part_number_{part}": schema})
        return schema

    return _filled(chain, num_bytes)


def pathological() -> Schema:
    """A few kilobytes of patterns whose pairwise intersections take the compiler long."""
    names = (MARK, *map(str, range(NUM_PATTERNS)))
    return {"type": "object", "patternProperties": {f"^{name}_(.*x){{20}}$": {} for name in names}}


def tools() -> list[Tool]:
    """Tools with wide parameters."""
    parameters = wide(TOOLS_BYTES // NUM_TOOLS)
    return [Tool(f"{MARK}_{number}", None, parameters, strict=False) for number in range(NUM_TOOLS)]


def request_of_schema(schema: Schema) -> LargeRequest:
    """A request for a short answer that must be JSON of `schema`."""
    parameters = {"max_new_tokens": NEW_TOKENS, "grammar": {"type": "json", "value": schema}}
    body = orjson.dumps({"inputs": "Say it:", "parameters": parameters})
    return LargeRequest("/generate", body, RawGrammar(GrammarKind.JSON_SCHEMA, schema).read)


def request_of_little() -> LargeRequest:
    """A small schema, sent by another route to be distinguishable."""
    large = request_of_schema(_object({MARK: {"type": "boolean"}}))
    return replace(large, path="/")


def request_of_tools(offered: Sequence[Tool]) -> LargeRequest:
    """A chat that must call one of the tools."""
    body = {
        "messages": [{"role": "user", "content": "Call it."}],
        "max_tokens": NEW_TOKENS,
        "tools": [tool.as_json() for tool in offered],
        "tool_choice": "required",
    }
    read = partial(chat_grammar, format_of(None), offered, ToolChoice("required"), None)
    return LargeRequest("/v1/chat/completions", orjson.dumps(body), read)


def _filled(part: Callable[[int], Schema], num_bytes: int) -> Schema:
    """An object with the fewest parts that make at least `num_bytes` of JSON."""
    properties: dict[str, Schema] = {MARK: {"type": "null"}}
    left = num_bytes
    while left > 0:
        name, schema = f"part_{len(properties)}", part(len(properties))
        properties[name] = schema
        # The name appears twice, each time with quotes and a comma.
        left -= len(orjson.dumps(schema)) + 2 * len(name) + 7
    return _object(properties)


def _object(properties: Mapping[str, Schema]) -> Schema:
    """An object with these properties, all required, and no others."""
    # The compiler refuses thousands of optional properties, because each may come next.
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }
