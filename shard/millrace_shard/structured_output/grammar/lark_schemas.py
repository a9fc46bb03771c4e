"""JSON Schemas within a grammar in llguidance's Lark, made as exact as those that come alone."""

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
"""Strings, expressions, special tokens and comments of llguidance, which hold no schemas; and what comes before one."""
_DECODER = JSONDecoder()


def with_exact_schemas(lark: str) -> str:
    """`lark` that allows the same texts; what of it llguidance would not keep is refused, unless it says `lenient`.

    Raises SchemaInvalid, RecursionError.
    """
    parts, done, place = list[str](), 0, 0
    while (token := _TOKEN.search(lark, place)) is not None:
        place = token.end()
        if token["json"] is None:
            continue
        try:
            schema, end = _DECODER.raw_decode(lark, place)
        except ValueError:
            # llguidance says what is wrong, and where.
            return lark
        parts += [lark[done:place], _exact(schema) or lark[place:end]]
        done = place = end
    return "".join([*parts, lark[done:]])


def _exact(schema: Schema) -> str | None:
    """None where it cannot be had, and need not."""
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
