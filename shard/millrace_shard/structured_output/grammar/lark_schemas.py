"""JSON Schemas within Lark grammars, which are made as exact as schemas alone."""

from __future__ import annotations

import json
import re
from json import JSONDecoder

from millrace_shard.structured_output.grammar.json_schema import Schema, SchemaInvalid, make_exact

_TOKEN = re.compile(
    r"""
      "(?:[^"\\\n]|\\.)*"
    | /(?![/*])(?:[^/\\]|\\.)+/
    | <[^<>\s]+>
    | (?://|\#)[^\n]*
    | (?P<json>%json\s*)(?=\{)
    """,
    re.VERBOSE,
)
"""Lark's strings, expressions, special tokens and comments, which contain no schemas, and the start of a schema."""
_DECODER = JSONDecoder()


def with_exact_schemas(lark: str) -> str:
    """`lark` with exact schemas, which allows the same texts.

    Raises SchemaInvalid for a schema that llguidance would not enforce, unless it is `lenient`; RecursionError.
    """
    parts, done, place = list[str](), 0, 0
    while (token := _TOKEN.search(lark, place)) is not None:
        place = token.end()
        if token["json"] is None:
            continue
        try:
            schema, end = _DECODER.raw_decode(lark, place)
        except ValueError:
            # llguidance reports the error and its place.
            return lark
        parts += [lark[done:place], _exact(schema) or lark[place:end]]
        done = place = end
    return "".join([*parts, lark[done:]])


def _exact(schema: Schema) -> str | None:
    """The exact schema, or None for a `lenient` one that cannot be exact."""
    guidance = schema.pop("x-guidance", {})
    if not isinstance(guidance, dict):
        raise SchemaInvalid("`x-guidance` has to be an object")
    try:
        escapes = make_exact(schema)
    except SchemaInvalid:
        if guidance.get("lenient") is True:
            return None
        raise
    return json.dumps(schema | {"x-guidance": {"json_allowed_escapes": escapes} | guidance})
