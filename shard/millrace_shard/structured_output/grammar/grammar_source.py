"""Grammars as users write them, turned into the one language that llguidance is given: its Lark."""

from __future__ import annotations

import json
from collections.abc import Callable

from llguidance import LLMatcher

from millrace_shard.batch.sequence import Grammar, GrammarKind
from millrace_shard.structured_output.grammar.json_schema import SchemaInvalid, read_schema
from millrace_shard.structured_output.grammar.lark_schemas import with_exact_schemas

NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""Masks then hold every token that may come next, not only the one that llguidance would split forced text into."""


class GrammarInvalid(ValueError):  # noqa: N818
    """No sequence can have this grammar; says why, for whoever wrote it."""


def lark_of(grammar: Grammar) -> str:
    """`grammar` for `LLMatcher`. Raises GrammarInvalid for a schema that would not be kept; the rest is not checked."""
    try:
        lark = TRANSLATIONS[grammar.kind](grammar.source)
    except SchemaInvalid as error:
        raise GrammarInvalid(str(error)) from error
    # Last, where it overrides what the grammar itself says. In an object, because a text that begins with a brace would
    # be taken for llguidance's own format.
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
