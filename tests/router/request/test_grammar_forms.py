"""Grammars and response formats as clients write them: what each means, and what is none."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError as ShapeError

from millrace_router.api.openai.request import ChatCompletionRequest, CompletionRequest
from millrace_router.api.tgi.request import GenerateParameters
from millrace_router.errors import ValidationError
from millrace_router.request.dialect import MILLRACE
from millrace_router.request.grammar import (
    ANY_OBJECT,
    MAX_LEVELS,
    MAX_PARTS,
    MAX_SOURCE_BYTES,
    RawGrammar,
)
from millrace_router.request.request import Grammar, GrammarKind

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["ü", None]}}}
TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"enum":["ü",null]}}}'
OF_SCHEMA = Grammar(
    GrammarKind.JSON_SCHEMA, TEXT[:-1] + ',"additionalProperties":false}', closes=True
)
ANY = ANY_OBJECT.read()


def native(grammar: object) -> Grammar:
    parameters = GenerateParameters.model_validate({"grammar": grammar})
    assert parameters.grammar is not None
    return parameters.grammar.raw().read()


def openai(response_format: object) -> Grammar | None:
    asked = {"messages": [{"role": "user", "content": "a"}], "response_format": response_format}
    chat = ChatCompletionRequest.model_validate(asked).generation(MILLRACE).grammar
    completion = {"prompt": "a", "response_format": response_format}
    assert CompletionRequest.model_validate(completion).generation(MILLRACE).grammar == chat
    return chat.read() if isinstance(chat, RawGrammar) else chat


@pytest.mark.parametrize(
    ("grammar", "meaning"),
    [
        ({"type": "json", "value": SCHEMA}, OF_SCHEMA),
        ({"type": "json", "value": json.dumps(SCHEMA, indent=3)}, OF_SCHEMA),
        ({"type": "json_object", "value": SCHEMA}, OF_SCHEMA),
        ({"type": "json_object"}, ANY),
        ({"type": "json_object", "value": None}, ANY),
        ({"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}, OF_SCHEMA),
        ({"type": "json_schema", "value": {"schema": TEXT, "strict": True}}, OF_SCHEMA),
        ({"type": "json", "value": {}}, Grammar(GrammarKind.JSON_SCHEMA, "{}", closes=True)),
        ({"type": "regex", "value": r"\d+ (a|ü)"}, Grammar(GrammarKind.REGEX, r"\d+ (a|ü)")),
        ({"type": "regex", "value": ""}, Grammar(GrammarKind.REGEX, "")),
        ({"type": "lark", "value": 'start: "a"'}, Grammar(GrammarKind.LARK, 'start: "a"')),
        ({"type": "ebnf", "value": 'start: "a"'}, Grammar(GrammarKind.LARK, 'start: "a"')),
    ],
)
def test_native_grammars_are_read(grammar: dict[str, Any], meaning: Grammar) -> None:
    assert native(grammar) == meaning


@pytest.mark.parametrize(
    ("response_format", "meaning"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, ANY),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, OF_SCHEMA),
        (
            {
                "type": "json_schema",
                "json_schema": {
                    "name": "x",
                    "description": "y",
                    "strict": True,
                    "schema": SCHEMA,
                },
            },
            OF_SCHEMA,
        ),
        ({"type": "json_schema", "json_schema": {"name": "x", "strict": None}}, ANY),
        ({"type": "json_object", "value": SCHEMA}, OF_SCHEMA),
        ({"type": "json", "value": TEXT}, OF_SCHEMA),
        ({"type": "json_schema", "value": {"name": None, "schema": SCHEMA}}, OF_SCHEMA),
        ({"type": "json_schema", "value": None, "json_schema": {"schema": SCHEMA}}, OF_SCHEMA),
        ({"type": "regex", "value": "a|b"}, Grammar(GrammarKind.REGEX, "a|b")),
        ({"type": "lark", "value": "start: /a/"}, Grammar(GrammarKind.LARK, "start: /a/")),
    ],
)
def test_response_formats_become_grammars(
    response_format: dict[str, Any] | None, meaning: Grammar | None
) -> None:
    assert openai(response_format) == meaning


@pytest.mark.parametrize(
    "grammar",
    [
        {"type": "json"},
        {"type": "json", "value": None},
        {"type": "json", "value": 5},
        {"type": "json", "value": [SCHEMA]},
        {"type": "json_object", "value": True},
        {"type": "json_schema", "value": {"schema": None}},
        {"type": "json_schema", "value": {"schema": False}},
    ],
)
def test_what_is_neither_object_nor_text_is_not_supported(grammar: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"^Input validation error: grammar is not supported"):
        native(grammar)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty document"),
        ("{", "line 1 column 2"),
        ("nonsense", "invalid literal"),
        ('{"a":1e999}', "line 1 column"),
        ("[]", "the schema is not an object"),
        ("true", "the schema is not an object"),
        ('"x"', "the schema is not an object"),
        ("[" * 5000 + "]" * 5000, "depth limit"),
    ],
)
def test_text_that_is_no_schema_is_not_valid(text: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=rf"error: grammar is not valid: .*({reason})"):
        native({"type": "json", "value": text})


@pytest.mark.parametrize(
    "grammar",
    [
        {},
        {"type": "yaml", "value": "a"},
        {"type": "text"},
        {"value": "a"},
        {"type": "regex"},
        {"type": "regex", "value": None},
        {"type": "regex", "value": {"a": 1}},
        {"type": "lark"},
        {"type": "json_schema"},
        {"type": "json_schema", "value": SCHEMA},
        {"type": "json_schema", "value": TEXT},
        "a+",
        ["a+"],
    ],
)
def test_what_has_the_form_of_no_grammar_does_not_fit_the_body(grammar: object) -> None:
    with pytest.raises(ShapeError):
        GenerateParameters.model_validate({"grammar": grammar})


@pytest.mark.parametrize(
    "response_format",
    [
        {},
        {"type": "grammar"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": None, "value": None},
        {"type": "json_schema", "json_schema": TEXT},
        {"type": "regex"},
        "json_object",
    ],
)
def test_what_has_the_form_of_no_response_format_does_not_fit_either(
    response_format: object,
) -> None:
    with pytest.raises(ShapeError):
        openai(response_format)


def schema_of(num_bytes: int) -> dict[str, Any]:
    """A schema whose JSON has that many bytes."""
    empty = len(orjson.dumps({"const": ""}))
    return {"const": "x" * (num_bytes - empty)}


@pytest.mark.parametrize(
    "grammar_of",
    [
        lambda size: {"type": "json", "value": schema_of(size)},
        lambda size: {"type": "json", "value": orjson.dumps(schema_of(size)).decode()},
        lambda size: {"type": "regex", "value": "a" * size},
        lambda size: {"type": "lark", "value": "a" * size},
    ],
    ids=["object", "text", "regex", "lark"],
)
def test_a_grammar_has_a_greatest_size(grammar_of: Any) -> None:
    assert len(native(grammar_of(MAX_SOURCE_BYTES)).source) == MAX_SOURCE_BYTES
    with pytest.raises(
        ValidationError, match=f"most {MAX_SOURCE_BYTES} bytes. Given: {MAX_SOURCE_BYTES + 1}"
    ):
        native(grammar_of(MAX_SOURCE_BYTES + 1))


def test_a_size_counts_bytes() -> None:
    with pytest.raises(ValidationError, match=f"Given: {MAX_SOURCE_BYTES + 2}"):
        native({"type": "regex", "value": "ü" * (MAX_SOURCE_BYTES // 2 + 1)})


@given(st.integers(1, 180), st.booleans())
def test_a_schema_has_a_greatest_depth(num_levels: int, as_text: bool) -> None:
    value: Any = 1
    for level in reversed(range(num_levels)):
        value = [value, 2] if level % 2 else {"a": value, "b": []}
    # The list next to the innermost value is as deep a level as an array in its place.
    deepest = num_levels + (num_levels % 2)
    grammar = {"type": "json", "value": json.dumps(value) if as_text else value}
    if deepest <= MAX_LEVELS:
        assert json.loads(native(grammar).source) == value
    else:
        with pytest.raises(ValidationError, match=f"at most 128 levels. Given: {deepest}"):
            native(grammar)


@pytest.mark.parametrize("kind", ["regex", "lark"])
@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ("(" * 128 + ")" * 128, True),
        ("(" * 129 + ")" * 129, False),
        ("([{" * 43 + ")]}" * 43, False),
        ("()" * 1000, True),
        (r"\(" * 1000, True),
        (r"\\(" * 129, False),
        (r"\\\(" * 1000, True),
        (")" * 1000, True),
        ("(" * 128 + r"ü\x\[" + "[)]", False),
        ("a" * 100_000, True),
        ("a\\", True),
    ],
)
def test_other_grammars_have_a_greatest_depth(kind: str, text: str, *, is_taken: bool) -> None:
    grammar = {"type": kind, "value": text}
    if is_taken:
        assert native(grammar).source == text
    else:
        with pytest.raises(ValidationError, match=r"at most 128 levels\. Given: 129"):
            native(grammar)


@pytest.mark.parametrize(
    "grammar_of",
    [
        lambda count: {"type": "json", "value": json.dumps({"enum": [{}] * (count - 2)})},
        lambda count: {"type": "regex", "value": "(a)" * count},
        lambda count: {"type": "lark", "value": "[a]" * count},
    ],
    ids=["text", "regex", "lark"],
)
def test_a_grammar_has_a_greatest_number_of_parts(grammar_of: Any) -> None:
    assert native(grammar_of(MAX_PARTS)).source
    with pytest.raises(ValidationError, match=r"at most 20000 pairs of brackets\. Given: 20001"):
        native(grammar_of(MAX_PARTS + 1))
