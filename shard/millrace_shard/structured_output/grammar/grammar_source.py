"""Translates grammars of users to Lark, the one input language for llguidance here."""

from __future__ import annotations

import json
from collections.abc import Callable

from llguidance import LLMatcher

from millrace_proto.sequence import Grammar, GrammarKind
from millrace_shard.structured_output.grammar.json_schema import SchemaInvalid, read_schema
from millrace_shard.structured_output.grammar.lark_schemas import with_exact_schemas

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
    # The last option overrides those of the grammar. The grammar is wrapped in an object, because llguidance reads a
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
