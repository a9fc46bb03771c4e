"""Objects with `properties` and no word on others, which have no others."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace_router.request.grammar import RawGrammar
from millrace_router.request.request import GrammarKind
from millrace_router.request.schemas.closed_objects import with_closed_objects

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
