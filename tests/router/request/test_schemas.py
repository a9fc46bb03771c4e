"""Schemas as TGI's users write them: without types, and with objects that say nothing of other properties."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError as ShapeError

from millrace_router.api.openai.request import ChatCompletionRequest, CompletionRequest
from millrace_router.api.responses.request import ResponsesRequest
from millrace_router.api.tgi.request import GenerateParameters
from millrace_router.errors import ValidationError
from millrace_router.request.grammar import (
    ANY_OBJECT,
    MAX_LEVELS,
    MAX_PARTS,
    MAX_SOURCE_BYTES,
    RawGrammar,
)
from millrace_router.request.limits import MILLRACE
from millrace_router.request.request import Grammar, GrammarKind
from millrace_router.request.schemas import with_closed_objects, with_implied_types

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}
CLOSED_A = {**A, "additionalProperties": False}
KIND_A, KIND_B = (
    {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}
    for kind in "ab"
)


def accepts(schema: dict[str, Any], value: object) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def test_a_grammar_is_read_closed() -> None:
    for value in (A, json.dumps(A), {"properties": A["properties"]}):
        assert json.loads(RawGrammar(GrammarKind.JSON_SCHEMA, value).read().source) == CLOSED_A


@pytest.mark.parametrize("word", [True, {}, {"type": "integer"}, False])
def test_a_schema_that_states_additional_properties_stays_as_it_is(word: object) -> None:
    schema = {**A, "additionalProperties": word}
    assert with_closed_objects(schema) == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "required": ["a"]},
        {**A, "patternProperties": {"^x": {}}},
        {**A, "unevaluatedProperties": True},
        {"not": A},
        {**A, "minProperties": 2},
        {"oneOf": [A, B]},
        {"allOf": [A, {"type": "object", "additionalProperties": {"type": "string"}}]},
        {"allOf": [A, {"$ref": "other.json"}]},
        {"properties": 1},
        {"enum": [{"properties": {}}]},
    ],
)
def test_schemas_that_cannot_be_closed_stay_as_they_are(schema: dict[str, Any]) -> None:
    assert with_closed_objects(schema) == schema


@pytest.mark.parametrize(
    "around",
    [
        lambda inner: {"type": "object", "properties": {"x": inner}, "additionalProperties": True},
        lambda inner: {"type": "array", "items": inner},
        lambda inner: {"type": "array", "prefixItems": [inner]},
        lambda inner: {"anyOf": [inner, {"type": "null"}]},
        lambda inner: {"allOf": [inner]},
        lambda inner: {"oneOf": [inner, {"type": "null"}]},
        lambda inner: {"$ref": "#/$defs/x", "$defs": {"x": inner}},
        lambda inner: {"type": "object", "additionalProperties": inner},
    ],
)
def test_objects_within_others_are_closed(around: Any) -> None:
    assert with_closed_objects(around(A)) == around(CLOSED_A)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [A, B]},
        {**A, "allOf": [B]},
        {"$ref": "#/$defs/B", **A, "$defs": {"B": B}},
        {"allOf": [{"$ref": "#/$defs/B"}, A], "$defs": {"B": B}},
    ],
)
def test_schemas_that_hold_together_are_closed_as_one(schema: dict[str, Any]) -> None:
    closed = with_closed_objects(schema)
    assert accepts(closed, {"a": 1, "b": "x"})
    assert not accepts(closed, {"a": 1, "b": "x", "c": 2})


def test_branches_that_only_require_leave_the_names() -> None:
    schema = {**A, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    closed = with_closed_objects(schema)
    assert accepts(closed, {"a": 1})
    assert accepts(closed, {"b": 1})
    assert not accepts(closed, {"a": 1, "c": 1})


def test_a_required_name_counts_as_listed() -> None:
    closed = with_closed_objects({**A, "required": ["z"]})
    assert accepts(closed, {"z": 1})
    assert not accepts(closed, {"z": 1, "y": 1})


def test_options_with_their_own_constants_are_closed() -> None:
    closed = with_closed_objects({"oneOf": [KIND_A, {"$ref": "#/$defs/b"}], "$defs": {"b": KIND_B}})
    assert accepts(closed, {"kind": "a"})
    assert not accepts(closed, {"kind": "b", "x": 1})


names = st.sampled_from(["a", "b", "c"])
leaves = st.sampled_from(
    [{"type": "integer"}, {"type": "null"}, {"const": 1}, {"const": 2}, {}, True]
)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(names, inner, max_size=2)},
            optional={
                "required": st.lists(names, unique=True, max_size=2),
                "additionalProperties": st.booleans() | inner,
                "anyOf": st.lists(inner, min_size=1, max_size=2),
            },
        ),
        st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"oneOf": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)}),
    ),
    max_leaves=8,
)
values = st.recursive(
    st.sampled_from([None, 1, 2]),
    lambda inner: st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


@given(schemas.filter(lambda schema: isinstance(schema, dict)), values)
def test_closed_schemas_allow_no_more_than_open_ones(schema: dict[str, Any], value: object) -> None:
    closed = with_closed_objects(schema)
    if accepts(closed, value):
        assert accepts(schema, value)
    assert accepts(with_closed_objects(closed), value) == accepts(closed, value)


NAME = {"properties": {"name": {"type": "string"}}}
OBJECT = {"type": "object", **NAME}


def test_properties_make_an_object() -> None:
    grammar = RawGrammar(GrammarKind.JSON_SCHEMA, NAME).read()
    assert json.loads(grammar.source) == {**OBJECT, "additionalProperties": False}


@pytest.mark.parametrize(
    ("given_", "meant"),
    [
        pytest.param({"properties": {"a": NAME}}, {"a": OBJECT}, id="property"),
        pytest.param(
            {"properties": {"properties": {"type": "integer"}}},
            {"properties": {"type": "integer"}},
            id="property-of-that-name",
        ),
    ],
)
def test_nested_properties_make_an_object_too(
    given_: dict[str, object], meant: dict[str, object]
) -> None:
    assert with_implied_types(given_) == {"type": "object", "properties": meant}


@pytest.mark.parametrize("name", ["anyOf", "allOf", "prefixItems"])
def test_types_are_implied_in_choices_and_tuples(name: str) -> None:
    assert with_implied_types({name: [NAME, {"type": "null"}]}) == {
        name: [OBJECT, {"type": "null"}]
    }


def test_one_of_several_objects_gets_object_types() -> None:
    assert with_implied_types({"oneOf": [NAME, OBJECT, NAME]}) == {"oneOf": [OBJECT] * 3}


@pytest.mark.parametrize("other", [{"type": "null"}, {"$ref": "#"}, True, {"enum": [{}]}])
def test_one_of_an_object_and_another_type_stays_as_it_is(other: object) -> None:
    """Null has every property that is asked of objects alone: it matches both, and so not one."""
    schema = {"oneOf": [NAME, other]}
    assert with_implied_types(schema) == schema


@pytest.mark.parametrize("name", ["$defs", "definitions"])
def test_types_are_implied_in_definitions(name: str) -> None:
    schema = {"$ref": f"#/{name}/a", name: {"a": NAME}}
    assert with_implied_types(schema) == {"$ref": f"#/{name}/a", name: {"a": OBJECT}}


def test_types_are_implied_in_items() -> None:
    assert with_implied_types({"type": "array", "items": NAME})["items"] == OBJECT


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["object", "null"], **NAME},
        {"$ref": "#/$defs/a", **NAME},
        {"not": NAME},
        {"if": NAME},
        {"const": {"properties": {}}},
        {"enum": [{"properties": {}}]},
    ],
    ids=["type", "reference", "not", "if", "const", "enum"],
)
def test_schemas_that_define_other_properties_stay(schema: dict[str, object]) -> None:
    assert with_implied_types(schema) == schema


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["properties", "items", "anyOf", "a"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["properties", "items", "anyOf", "$defs"]), json_values))
def test_implying_types_twice_changes_nothing_more(schema: dict[str, object]) -> None:
    once = with_implied_types(schema)
    assert with_implied_types(once) == once


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
def test_grammars_must_be_objects_or_texts(grammar: dict[str, Any]) -> None:
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
def test_malformed_grammars_do_not_fit_the_body(grammar: object) -> None:
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
def test_malformed_response_formats_do_not_fit_the_body(
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


CAT = {
    "type": "object",
    "properties": {"kind": {"const": "cat", "default": "cat"}, "lives": {"type": "integer"}},
}
DOG = {
    "type": "object",
    "properties": {"kind": {"enum": ["dog"], "default": "dog"}, "tricks": {"type": "array"}},
}


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [CAT, DOG]},
        {"oneOf": [CAT, DOG, {"not": {}}, False]},
        {"oneOf": [CAT, {"type": "null"}, DOG]},
        {
            "$defs": {"Cat": CAT, "Dog": DOG},
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            "discriminator": {"propertyName": "kind"},
        },
    ],
)
def test_the_constant_that_distinguishes_options_becomes_required(schema: dict[str, Any]) -> None:
    closed = with_closed_objects(with_implied_types(schema))
    options = list(closed["$defs"].values() if "$defs" in closed else closed["oneOf"])
    objects = [one for one in options if one and "properties" in one]
    assert [one["required"] for one in objects] == [["kind"], ["kind"]]
    assert [one["additionalProperties"] for one in objects] == [False, False]


def test_options_without_a_constant_of_their_own_stay_as_they_are() -> None:
    schema = {"oneOf": [CAT, {"properties": {"kind": {"const": "cat"}}}]}
    assert with_closed_objects(schema) == schema


@pytest.mark.parametrize(
    ("form", "meaning"),
    [
        ({"type": "json_object", "schema": SCHEMA}, OF_SCHEMA),
        ({"type": "json", "schema": TEXT}, OF_SCHEMA),
        ({"type": "json_schema", "schema": SCHEMA}, OF_SCHEMA),
    ],
)
def test_schemas_in_places_of_other_servers_are_read(form: Any, meaning: Grammar) -> None:
    assert openai(form) == meaning
    if form["type"] != "json_schema":
        assert native(form) == meaning


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "x", "$ref": "#", "strict": True}},
        {"type": "json_schema", "value": SCHEMA},
        {"type": "json_object", "json_schema": {"schema": SCHEMA}},
        {"type": "json_object", "value": SCHEMA, "schema": SCHEMA},
        {"type": "text", "schema": SCHEMA},
        {"type": "text", "json_schema": {"schema": SCHEMA}},
        {"type": "regex", "value": "a", "schema": SCHEMA},
        {"type": "lark", "value": "a", "json_schema": SCHEMA},
    ],
)
def test_schemas_that_would_be_lost_are_refused(form: Any) -> None:
    with pytest.raises(ShapeError, match="schema"):
        openai(form)
    with pytest.raises(ShapeError):
        GenerateParameters.model_validate({"response_format": form})
    with pytest.raises(ShapeError):
        ResponsesRequest.model_validate({"input": "a", "text": {"format": form}})
