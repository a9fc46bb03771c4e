"""Requests whose grammars are as large as is allowed, or take the compiler to its limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import orjson

from millrace_router.request.grammar import JsonGrammar
from millrace_router.request.request import Grammar
from millrace_router.tool_calls.formats import format_of
from millrace_router.tool_calls.grammar import chat_grammar
from millrace_router.tool_calls.tool import Tool, ToolChoice

Schema = dict[str, Any]

NUM_BYTES = 125_000
"""Length of the JSON: a little below 128 KiB, the limit of a grammar."""
TOOLS_BYTES, NUM_TOOLS = 112_000, 12
"""Their grammar adds a tenth to them."""
NUM_LEVELS = 64
"""Schemas within schemas, as many as are allowed."""
NUM_PATTERNS = 1000
NEW_TOKENS = 8
MARK = "NUMBER"
"""Where each request has a number of its own, lest its grammar be known."""
PARTS: Mapping[str, Schema] = {
    "description": {"type": "string"},
    "name": {"type": "string", "maxLength": 64},
    "amount": {"type": "integer", "minimum": 0},
    "colour": {"enum": ["red", "green", "blue"]},
}


@dataclass(frozen=True, slots=True)
class LargeRequest:
    """What is posted, and what the router makes of it."""

    path: str
    body: bytes
    """With MARK in it."""
    read: Callable[[], Grammar | None]
    """Reads the grammar as the router does."""

    def numbered(self, number: str) -> bytes:
        """A body with a grammar that no other number has."""
        # So cheap that whoever stamps tokens beside it is not held up.
        return self.body.replace(MARK.encode(), number.encode())


def wide(num_bytes: int = NUM_BYTES) -> Schema:
    """Many objects of a few properties each."""
    return _filled(
        lambda part: _object({f"{name}_of_part_number_{part}": of for name, of in PARTS.items()}),
        num_bytes,
    )


def deep(num_bytes: int = NUM_BYTES) -> Schema:
    """Many objects that are nested as deep as is allowed."""

    def chain(part: int) -> Schema:
        schema: Schema = {"type": "integer"}
        for level in range(NUM_LEVELS - 2):
            schema = _object({f"level_{level}_of_the_nested_objects_of_part_number_{part}": schema})
        return schema

    return _filled(chain, num_bytes)


def pathological() -> Schema:
    """A few kilobytes of patterns, each pair of which takes long to be told apart."""
    names = (MARK, *map(str, range(NUM_PATTERNS)))
    return {"type": "object", "patternProperties": {f"^{name}_(.*x){{20}}$": {} for name in names}}


def tools() -> list[Tool]:
    """Tools with wide parameters."""
    parameters = wide(TOOLS_BYTES // NUM_TOOLS)
    return [Tool(f"{MARK}_{number}", None, parameters, strict=False) for number in range(NUM_TOOLS)]


def request_of_schema(schema: Schema) -> LargeRequest:
    """A short answer that has to be JSON of `schema`."""
    grammar = JsonGrammar(type="json", value=schema)
    parameters = {"max_new_tokens": NEW_TOKENS, "grammar": grammar.model_dump()}
    body = orjson.dumps({"inputs": "Say it:", "parameters": parameters})
    return LargeRequest("/generate", body, grammar.resolved)


def request_of_little() -> LargeRequest:
    """One that anybody sends: by another route, which tells it from the others."""
    large = request_of_schema(_object({MARK: {"type": "boolean"}}))
    return replace(large, path="/")


def request_of_tools(offered: Sequence[Tool]) -> LargeRequest:
    """A chat in which one of the tools has to be called."""
    body = {
        "messages": [{"role": "user", "content": "Call it."}],
        "max_tokens": NEW_TOKENS,
        "tools": [tool.as_json() for tool in offered],
        "tool_choice": "required",
    }
    read = partial(chat_grammar, format_of(None), offered, ToolChoice("required"), None)
    return LargeRequest("/v1/chat/completions", orjson.dumps(body), read)


def _filled(part: Callable[[int], Schema], num_bytes: int) -> Schema:
    """An object with as many parts as make `num_bytes` of JSON, or the first to make more."""
    properties: dict[str, Schema] = {MARK: {"type": "null"}}
    left = num_bytes
    while left > 0:
        name, schema = f"part_{len(properties)}", part(len(properties))
        properties[name] = schema
        # The name is there twice, and so are quotes and a comma.
        left -= len(orjson.dumps(schema)) + 2 * len(name) + 7
    return _object(properties)


def _object(properties: Mapping[str, Schema]) -> Schema:
    """All of them required, and no others."""
    # Optional ones in their thousands would be refused at once: each might be the next.
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }
