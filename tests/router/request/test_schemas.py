"""Schemas as TGI's users write them: without types, and with objects that say nothing of other properties."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace_router.request.grammar import RawGrammar
from millrace_router.request.request import GrammarKind
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
def test_a_word_on_others_counts(word: object) -> None:
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
def test_these_stay_as_they_are(schema: dict[str, Any]) -> None:
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
def test_what_the_closed_schema_allows_the_open_one_allows(
    schema: dict[str, Any], value: object
) -> None:
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
def test_nested_properties_do_too(given_: dict[str, object], meant: dict[str, object]) -> None:
    assert with_implied_types(given_) == {"type": "object", "properties": meant}


@pytest.mark.parametrize("name", ["anyOf", "allOf", "prefixItems"])
def test_types_are_implied_in_choices_and_tuples(name: str) -> None:
    assert with_implied_types({name: [NAME, {"type": "null"}]}) == {
        name: [OBJECT, {"type": "null"}]
    }


def test_one_of_several_objects_gets_object_types() -> None:
    assert with_implied_types({"oneOf": [NAME, OBJECT, NAME]}) == {"oneOf": [OBJECT] * 3}


@pytest.mark.parametrize("other", [{"type": "null"}, {"$ref": "#"}, True, {"enum": [{}]}])
def test_one_of_objects_and_others_means_what_it_says(other: object) -> None:
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
def test_what_has_said_otherwise_stays(schema: dict[str, object]) -> None:
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
def test_it_changes_nothing_twice(schema: dict[str, object]) -> None:
    once = with_implied_types(schema)
    assert with_implied_types(once) == once
