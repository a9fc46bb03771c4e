"""Translates grammars of users to Lark, the one input language for llguidance here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from json import JSONDecoder

from llguidance import LLMatcher

from millrace_proto.sequence import Grammar, GrammarKind
from millrace_shard.structured_output.json_schema import SchemaInvalid, make_exact, read_schema
from millrace_shard.structured_output.references import Schema

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
    return map_schemas(lark, _exact)


def map_schemas(lark: str, change: Callable[[Schema], str | None]) -> str:
    """`lark` with each schema as `change` writes it, or as it is where that returns None; `change` may alter it."""
    parts, done, position = list[str](), 0, 0
    while (token := _TOKEN.search(lark, position)) is not None:
        position = token.end()
        if token["json"] is None:
            continue
        try:
            schema, end = _DECODER.raw_decode(lark, position)
        except ValueError:
            # llguidance reports the error and its place.
            return lark
        parts += [lark[done:position], change(schema) or lark[position:end]]
        done = position = end
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


NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""With this option masks allow every possible next token; without it, llguidance chooses the tokens of forced text."""


class GrammarInvalid(ValueError):  # noqa: N818
    """A grammar that no sequence can have; the message gives the reason to its author."""


def lark_of(grammar: Grammar) -> str:
    """`grammar` for `LLMatcher`. Raises GrammarInvalid for a schema that llguidance would not enforce."""
    try:
        lark = TRANSLATIONS[grammar.kind](grammar.source)
    except SchemaInvalid as error:
        raise GrammarInvalid(str(error)) from error
    # The last option overrides the grammar's options. The grammar is wrapped in an object, because llguidance reads a
    # text that begins with a brace as its own format.
    return json.dumps({"grammars": [{"lark_grammar": lark + NO_FORCING}]})


def _of_schema(source: str) -> str:
    return f"start: %json {json.dumps(read_schema(source))}"


def _of_regex(pattern: str) -> str:
    described = json.loads(LLMatcher.grammar_from_regex(pattern))
    lark: str = described["grammars"][0]["lark_grammar"]
    return lark


TRANSLATIONS: dict[GrammarKind, Callable[[str], str]] = {
    GrammarKind.JSON_SCHEMA: _of_schema,
    GrammarKind.REGEX: _of_regex,
    GrammarKind.LARK: with_exact_schemas,
}
