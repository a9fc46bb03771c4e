"""Schemas within grammars in Lark, including tools' schemas, are kept as exactly as schemas that come alone."""

from __future__ import annotations

import json
import string
from typing import Any

import pytest
from bench.structured_output.schemas import problem
from hypothesis import given
from hypothesis import strategies as st

from millrace_router.tool_calls.parsing.lark import json_value
from millrace_router.tool_calls.parsing.parameters import arguments_schema
from millrace_router.tool_calls.tool import Tool
from millrace_shard.structured_output.grammar_source import GrammarInvalid, with_exact_schemas
from millrace_shard.structured_output.matcher import Matcher
from millrace_testing.engines.grammars import Words, lark

WORDS = Words([bytes([byte]) for byte in range(256)], size=300)
KEPT = [
    ({"type": "string", "format": "date"}, '"2024-02-29"', '"2023-02-29"'),
    ({"type": "number", "exclusiveMaximum": 3, "minimum": 2.5}, "2.5", "3"),
    ({"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}, "1.5", "1"),
    (
        {"type": "object", "properties": {"p": {"const": True}}, "required": ["p"]},
        '{"p":true}',
        r'{"p":true,"\u0070":0}',
    ),
]
"""A schema, JSON that is of it, and JSON that llguidance by itself would have for it."""


def accepts(matcher: Matcher, text: str) -> bool:
    return matcher.consume_all([*WORDS.split(text.encode()), WORDS.eos[0]]) and matcher.has_ended


@pytest.mark.parametrize(("described", "good", "bad"), KEPT)
def test_a_schema_in_a_grammar_is_kept_to_the_letter(
    described: dict[str, Any], good: str, bad: str
) -> None:
    assert problem(good, described) is None
    assert problem(bad, described) is not None
    grammar = lark(f'start: "it: " it // %json {{\nit: %json {json.dumps(described)}\n')
    assert accepts(WORDS.matcher(grammar), f"it: {good}")
    assert not accepts(WORDS.matcher(grammar), f"it: {bad}")


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("described", "good", "bad"), KEPT)
def test_arguments_of_tools_are(
    described: dict[str, Any], good: str, bad: str, *, strict: bool
) -> None:
    parameters = {"type": "object", "properties": {"a": described}, "required": ["a"]}
    tool = Tool("tool", None, parameters, strict=strict)
    grammar = lark(f"start: {json_value(arguments_schema(tool))}")
    assert accepts(WORDS.matcher(grammar), f'{{"a":{good}}}')
    assert not accepts(WORDS.matcher(grammar), f'{{"a":{bad}}}')


def test_unenforceable_schemas_are_refused_unless_lenient() -> None:
    endless = {"$ref": "#"}
    with pytest.raises(GrammarInvalid, match="refers to itself"):
        WORDS.matcher(lark(f"start: %json {json.dumps(endless)}"))
    huge = {"type": "integer", "maximum": 10**20}
    with pytest.raises(GrammarInvalid, match="2\\*\\*53"):
        WORDS.matcher(lark(f"start: %json {json.dumps(huge)}"))
    lenient = {**huge, "x-guidance": {"lenient": True}}
    assert accepts(WORDS.matcher(lark(f"start: %json {json.dumps(lenient)}")), "7")


def test_a_grammar_may_ask_for_other_spacing() -> None:
    described = {"type": "array", "x-guidance": {"whitespace_flexible": False}}
    grammar = lark(f"start: %json {json.dumps(described)}")
    assert accepts(WORDS.matcher(grammar), "[1,2]")
    assert not accepts(WORDS.matcher(grammar), "[1, 2]")


@pytest.mark.parametrize("of", ["[1]", '"lenient"'])
def test_what_is_asked_of_the_library_is_an_object(of: str) -> None:
    with pytest.raises(GrammarInvalid, match="x-guidance"):
        WORDS.matcher(lark(f'start: %json {{"x-guidance": {of}}}'))


@pytest.mark.parametrize("broken", ["{", '{"type": }', "{'a': 1}"])
def test_texts_that_are_not_json_are_refused(broken: str) -> None:
    with pytest.raises(GrammarInvalid):
        WORDS.matcher(lark(f"start: %json {broken}"))


@pytest.mark.parametrize(
    "source",
    [
        r'start: "a \" %json {\"type\": 1}"',
        'start: /%json {"type"}/',
        r'start: /\/%json {"format": "date"}/',
        'start: "a" // %json {"format": "date"}\n',
        'start: "a" # %json {"format": "date"}\n',
        'start: %regex {"substring_words": "%json {"}',
        "start: %json true",
    ],
)
def test_strings_expressions_and_comments_hold_no_schemas(source: str) -> None:
    assert with_exact_schemas(source) == source


@pytest.mark.parametrize(
    "pieces",
    [
        ("start: </think> %json ", " </s>"),
        ("start: <tool#call> %json ", ""),
        ('start: <a"b> %json ', ' "x"'),
        ("start: /a\nb/ %json ", ' "x/y"'),
        ("start: /[/ /]/ %json ", ""),
        ('start: "a" //\n | %json ', " # /\n"),
    ],
)
def test_schemas_are_found_beside_special_tokens_and_expressions(pieces: tuple[str, str]) -> None:
    described = json.dumps({"type": "string", "format": "date"})
    exact = with_exact_schemas(f"%json {described}").removeprefix("%json ")
    assert exact != described
    assert with_exact_schemas(described.join(pieces)) == exact.join(pieces)


LITERALS = st.text(st.sampled_from([*string.ascii_letters, *'{}%"/\\#\n ']), max_size=20)
DATE = {"type": "string", "format": "date"}


@given(before=LITERALS, between=LITERALS)
def test_schemas_are_found_between_any_literals(before: str, between: str) -> None:
    """Every schema is replaced, and nothing else."""
    described = json.dumps(DATE)
    pieces = [f"start: {json.dumps(before)} %json ", f" {json.dumps(between)} %json\n", ' "z"']
    exact = with_exact_schemas(f"%json {described}").removeprefix("%json ")
    assert exact != described
    assert with_exact_schemas(described.join(pieces)) == exact.join(pieces)
