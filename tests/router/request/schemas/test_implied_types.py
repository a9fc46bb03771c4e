"""Schemas as TGI's users write them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace_router.request.grammar import RawGrammar
from millrace_router.request.request import GrammarKind
from millrace_router.request.schemas.implied_types import with_implied_types

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
def test_choices_and_tuples(name: str) -> None:
    assert with_implied_types({name: [NAME, {"type": "null"}]}) == {
        name: [OBJECT, {"type": "null"}]
    }


def test_one_of_several_objects() -> None:
    assert with_implied_types({"oneOf": [NAME, OBJECT, NAME]}) == {"oneOf": [OBJECT] * 3}


@pytest.mark.parametrize("other", [{"type": "null"}, {"$ref": "#"}, True, {"enum": [{}]}])
def test_one_of_objects_and_others_means_what_it_says(other: object) -> None:
    """Null has every property that is asked of objects alone: it matches both, and so not one."""
    schema = {"oneOf": [NAME, other]}
    assert with_implied_types(schema) == schema


@pytest.mark.parametrize("name", ["$defs", "definitions"])
def test_definitions(name: str) -> None:
    schema = {"$ref": f"#/{name}/a", name: {"a": NAME}}
    assert with_implied_types(schema) == {"$ref": f"#/{name}/a", name: {"a": OBJECT}}


def test_items() -> None:
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
