"""JSON Schemas: what is generated always validates, what validates can be generated, the rest is refused by name."""

from __future__ import annotations

import json
import os
import random
import re
import string
from collections.abc import Iterator
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from bench.structured_output.schemas import problem
from hypothesis import given
from hypothesis import strategies as st

from millrace_router.tool_calls.parsing.lark import json_value
from millrace_router.tool_calls.parsing.parameters import arguments_schema
from millrace_router.tool_calls.tool import Tool
from millrace_shard.structured_output.grammar_source import GrammarInvalid, with_exact_schemas
from millrace_shard.structured_output.json_schema import SchemaInvalid, read_schema
from millrace_shard.structured_output.matcher import Matcher
from millrace_shard.structured_output.references import MAX_DEPTH
from millrace_testing.engines.grammars import Words, lark, schema, walk
from millrace_testing.engines.random_schemas import Schemas

SUITE = os.environ.get("JSON_SCHEMA_TEST_SUITE")
"""The folder draft2020-12 of the official suite, which jsonschema's source distribution carries as json/tests."""
PIECES = [
    *(bytes([byte]) for byte in range(256)),
    *(
        b'{"',
        b'":',
        b'": ',
        b'",',
        b'", "',
        b'"}',
        b'"]',
        b"true",
        b"null",
        b"00",
        b"12",
        b"ab",
        b"\xc3\xa9",
        b"\\n",
    ),
]
WORDS = Words(PIECES, size=320)
MOST_WRITINGS = 48
NUM_RANDOM = int(os.environ.get("RANDOM_SCHEMAS", "150"))


def matcher(described: object) -> Matcher:
    return WORDS.matcher(schema(json.dumps(described)))


def accepts(described: object, text: str, rng: random.Random | None = None) -> bool:
    """Whether `text` is complete JSON of the schema, split into tokens in one of the ways."""
    return takes(matcher(described), tokens_of(text, rng))


def tokens_of(text: str, rng: random.Random | None = None) -> list[int]:
    """A whole answer."""
    return [*WORDS.split(text.encode(), rng), WORDS.eos[0]]


def takes(found: Matcher, tokens: list[int]) -> bool:
    """Whether a matcher that is at its start takes a whole answer."""
    return found.consume_all(tokens) and found.has_ended


def compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


# From the specification, each with instances that it allows and ones that it does not.
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "type": ({"type": "integer"}, [0, -5, 10**12], [1.5, "1", None, True, [], {}]),
    "types": ({"type": ["string", "null"]}, ["a", None, ""], [1, False, []]),
    "any": ({}, [1, "x", None, [1, {"a": []}], {"b": {"c": -1.5e3}}], []),
    "enum": ({"enum": [1, "a", None, {"k": [1]}]}, [1, "a", None, {"k": [1]}], [2, "b", {"k": []}]),
    "const": ({"const": {"a": [True, "é"]}}, [{"a": [True, "é"]}], [{"a": [True]}, True]),
    "const, no boolean for a number": ({"const": 1}, [1], [True]),
    "const, no number for a boolean": ({"const": False}, [False], [0]),
    "properties": (
        {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        [{}, {"a": 1}, {"b": "x"}, {"a": 1, "b": ""}, {"c": []}, 7, "any other type"],
        [{"a": "x"}, {"b": 1}, {"a": 1, "b": 2}],
    ),
    "required": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"]},
        [{"b": 1}, {"a": 1, "b": 2}],
        [{}, {"a": 1}],
    ),
    "required, not listed": ({"type": "object", "required": ["x"]}, [{"x": 1}], [{}, {"y": 1}]),
    "additionalProperties": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "null"}},
        [{"a": 5}, {"a": 5, "z": None}, {"z": None}],
        [{"z": 1}],
    ),
    "no additionalProperties": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        [{}, {"a": 1}],
        [{"b": 1}, {"a": 1, "b": 1}],
    ),
    "patternProperties": (
        {
            "type": "object",
            "patternProperties": {"^x-": {"type": "integer"}},
            "additionalProperties": {"type": "string"},
        },
        [{"x-a": 1}, {"y": "s"}, {}],
        [{"x-a": "s"}, {"y": 1}],
    ),
    "minProperties": ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    "maxProperties": ({"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    "items": (
        {"type": "array", "items": {"type": "integer"}},
        [[], [1], [1, 2]],
        [["a"], [1, "a"]],
    ),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
        [[], [1], [1, "a"]],
        [["a"], [1, "a", 2]],
    ),
    "items after prefixItems": (
        {"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}},
        [[], [1], [1, 2, 2]],
        [[2], [1, 1]],
    ),
    "minItems, maxItems": (
        {"type": "array", "items": {"const": 0}, "minItems": 1, "maxItems": 2},
        [[0], [0, 0]],
        [[], [0, 0, 0]],
    ),
    "minLength, maxLength": (
        {"type": "string", "minLength": 2, "maxLength": 3},
        ["ab", "äöü", "日本", '"\\'],
        ["a", "abcd", "日", ""],
    ),
    "counts with a decimal point": ({"type": "string", "maxLength": 2.0}, ["ab"], ["abc"]),
    "pattern is found anywhere": ({"type": "string", "pattern": "b+"}, ["b", "abba"], ["a", ""]),
    "pattern with anchors": ({"type": "string", "pattern": "^a[0-9]$"}, ["a7"], ["xa7", "a77"]),
    "minimum": ({"type": "integer", "minimum": -3}, [-3, 0, 99], [-4, -10]),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 2.5}, [2.4, -7, 2], [2.5, 3]),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, [0, 3, -9, 123], [1, 10]),
    "multipleOf, decimal": ({"type": "number", "multipleOf": 0.01}, [0.07, 12.5, 3], [0.075]),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"const": "x"}]}, [1, "x"], ["y", None]),
    "anyOf with type": (
        {"type": "string", "anyOf": [{"maxLength": 1}, {"const": "abc"}]},
        ["a", "abc"],
        ["ab", 1],
    ),
    "oneOf of different types": (
        {"oneOf": [{"type": "null"}, {"type": "string"}]},
        [None, "a"],
        [1],
    ),
    "oneOf distinguished by a property": (
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
                {
                    "type": "object",
                    "properties": {"k": {"const": "b"}, "v": {"type": "null"}},
                    "required": ["k"],
                },
            ]
        },
        [{"k": "a", "v": 1}, {"k": "b", "v": None}],
        [{"k": "b", "v": 1}, {"k": "c"}, {}],
    ),
    "allOf": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"properties": {"a": {"minimum": 5}, "b": {"const": 1}}},
            ]
        },
        [{"a": 5}, {"a": 7, "b": 1}],
        [{"a": 4}, {"b": 1}, {"a": 5, "b": 2}],
    ),
    "$ref": (
        {
            "$ref": "#/$defs/p",
            "$defs": {"p": {"type": "array", "items": {"$ref": "#/$defs/q"}}, "q": {"const": 3}},
        },
        [[], [3, 3]],
        [3, [4]],
    ),
    "recursive $ref": (
        {
            "type": "object",
            "properties": {
                "v": {"type": "integer"},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
            },
            "required": ["v", "next"],
            "additionalProperties": False,
        },
        [{"v": 1, "next": None}, {"v": 1, "next": {"v": 2, "next": None}}],
        [{"v": 1}, {"v": 1, "next": 2}],
    ),
    "escapes in names": (
        {"type": "object", "properties": {'a"b\\c\n': {"const": 1}}, "additionalProperties": False},
        [{'a"b\\c\n': 1}, {}],
        [{"abc": 1}],
    ),
    "date": (
        {"type": "string", "format": "date"},
        ["2024-02-29", "2000-02-29", "2023-02-28", "1999-12-31"],
        ["2024-13-01", "2023-02-29", "1900-02-29", "2023-02-30", "2023-04-31", "x"],
    ),
    "date-time": (
        {"type": "string", "format": "date-time", "pattern": "Z$"},
        ["2024-02-29T10:00:00Z", "2023-03-30T23:59:59.5Z"],
        ["2023-02-29T10:00:00Z", "2024-02-29"],
    ),
    "uuid": (
        {"type": "string", "format": "uuid"},
        ["123e4567-e89b-12d3-a456-426614174000"],
        ["123e4567"],
    ),
    "annotations": (
        {
            "title": "t",
            "description": "d",
            "default": 1,
            "examples": [1],
            "$comment": "c",
            "type": "null",
        },
        [None],
        [1],
    ),
    "a property named like a keyword": (
        {
            "type": "object",
            "properties": {"not": {"const": 1}, "$ref": {"const": 2}},
            "required": ["not"],
        },
        [{"not": 1}, {"not": 1, "$ref": 2}],
        [{"not": 2}],
    ),
    "keywords that say nothing": (
        {
            "type": "array",
            "uniqueItems": False,
            "minContains": 2,
            "then": False,
            "items": {"const": 1},
        },
        [[], [1, 1]],
        [[2]],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_exactly_the_values_that_the_specification_allows_are_accepted(name: str) -> None:
    described, valid, invalid = CASES[name]
    for instance in valid:
        assert problem(compact(instance), described) is None, instance
        assert accepts(described, compact(instance), random.Random(name)), instance
    for instance in invalid:
        assert problem(compact(instance), described) is not None, instance
        assert not accepts(described, compact(instance)), instance


@pytest.mark.parametrize("name", CASES)
def test_walks_over_allowed_tokens_end_in_valid_json(name: str) -> None:
    described, _, _ = CASES[name]
    rng = random.Random(name)
    texts = [walk(matcher(described), WORDS, rng, most=400) for _ in range(12)]
    ended = [text.decode() for text in texts if text is not None]
    assert ended
    for text in ended:
        assert problem(text, described) is None, text


REFUSED: dict[str, Any] = {
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"maxLength": 2}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "contains": {"type": "array", "contains": {"const": 1}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "propertyNames": {"type": "object", "propertyNames": {"format": "email"}},
    "unevaluatedProperties": {
        "anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}],
        "unevaluatedProperties": False,
    },
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "minProperties": {"type": "object", "minProperties": 2},
    "format": {"type": "string", "format": 5},
    "look-around": {"type": "string", "pattern": "^(?=a)"},
    "http://elsewhere.example/x": {"$ref": "http://elsewhere.example/x"},
    "2**53": {"const": 2**53 + 1},
    "refers to itself": {"$ref": "#"},
}


@pytest.mark.parametrize("word", REFUSED)
@pytest.mark.parametrize("depth", [0, 2])
def test_unsupported_keywords_are_refused_by_name(word: str, depth: int) -> None:
    described = REFUSED[word]
    if word == "refers to itself" and depth:
        described = {"$ref": "#/properties/a"}
    for _ in range(depth):
        described = {"type": "object", "properties": {"a": described}, "required": ["a"]}
    if word == "refers to itself" and depth:
        described["properties"]["a"] = {"$ref": "#/properties/a"}
    with pytest.raises(GrammarInvalid) as refusal:
        matcher(described)
    assert word in str(refusal.value)


@pytest.mark.parametrize(
    "dialect",
    [
        "https://json-schema.org/draft-07/schema#",
        "http://json-schema.org/draft/2020-12/schema",
        "http://json-schema.org/schema#",
        "https://spec.openapis.org/oas/3.1/dialect/base",
        "made up",
    ],
)
def test_the_address_of_a_dialect_need_not_be_exact(dialect: str) -> None:
    described = {"$schema": dialect, "type": "object", "properties": {"a": {"type": "integer"}}}
    assert accepts(described, '{"a":1}')
    assert not accepts(described, '{"a":"x"}')


@pytest.mark.parametrize("version", [1, 4, 7])
def test_a_version_of_uuids_is_enforced(version: int) -> None:
    described = {"type": "string", "format": f"uuid{version}"}
    assert accepts(described, f'"123e4567-e89b-{version}2d3-a456-426614174000"')
    assert not accepts(described, '"123e4567-e89b-92d3-a456-426614174000"')
    assert not accepts(described, f'"123e4567-e89b-{version}2d3-c456-426614174000"')


@pytest.mark.parametrize(
    ("described", "place"),
    [
        (
            {"properties": {"a": {"type": "array", "uniqueItems": True}}},
            "/properties/a/uniqueItems",
        ),
        ({"properties": {"a": {"type": "string", "format": 5}}}, "/properties/a/format"),
        ({"properties": {"a": {"items": {"pattern": "["}}}}, "/properties/a/items/pattern"),
        ({"properties": {"a": {"type": "any"}}}, "/properties/a/type"),
        ({"properties": {"a": {"$ref": "#/$defs/gone"}}}, "/properties/a/$ref"),
        ({"anyOf": [{}, {"properties": {"a": {"const": 2**60}}}]}, "/anyOf/1/properties/a/const"),
        ({"$defs": {"B": {"pattern": "("}}, "items": {"$ref": "#/$defs/B"}}, "/$defs/B/pattern"),
        ({"properties": {"a": {"oneOf": [{}, {"type": "null"}]}}}, "/properties/a/oneOf"),
        (
            {"additionalProperties": {"propertyNames": {"format": "x"}, "not": {"const": 1}}},
            "/additionalProperties/not",
        ),
        ({"contains": {}}, "#/contains"),
        (
            {
                "type": "object",
                "required": ["a"],
                "properties": {"a": {"type": "array", "items": {"enum": []}, "minItems": 1}},
            },
            "/properties/a/items",
        ),
    ],
)
def test_a_refusal_names_the_place(described: dict[str, Any], place: str) -> None:
    with pytest.raises(GrammarInvalid, match=re.escape(f"{place}:")):
        matcher(described)


@pytest.mark.parametrize(
    ("described", "good", "bad"),
    [
        ({"pattern": "["}, '"x"', None),
        ({"type": "string", "pattern": "/^a$/i"}, '"B"', "1"),
        ({"type": "any"}, "[1]", None),
        ({"type": "STRING"}, '"x"', "1"),
        ({"type": ["str", "none"]}, "null", "1"),
        ({"$ref": "#/$defs/gone"}, "[1]", None),
        ({"type": "array", "items": {"type": "string", "pattern": "("}}, '["x"]', "1"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, '"x"', None),
        ({"type": "array", "minItems": "1"}, "[]", "1"),
        ({"anyOf": [{"pattern": "*"}, {"type": "null"}]}, "null", None),
        ({"enum": []}, "1", None),
    ],
)
def test_parameters_of_a_tool_go_without_what_cannot_be_compiled(
    described: dict[str, Any], good: str, bad: str | None
) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": described, "b": {"type": "integer"}},
        "required": ["a", "b"],
    }
    tool = Tool(name="f", description=None, parameters=parameters, strict=False)
    grammar = lark(f"start: {json_value(arguments_schema(tool))}")
    start = BYTES.matcher(grammar)
    assert consumes_all(start.copy(), f'{{"a": {good}, "b": 1}}')
    assert not consumes_all(start.copy(), f'{{"a": {good}, "b": "x"}}')
    assert bad is None or not consumes_all(start.copy(), f'{{"a": {bad}, "b": 1}}')


@pytest.mark.parametrize("described", [{"pattern": "["}, {"type": "any"}])
def test_a_strict_tool_that_cannot_be_compiled_is_refused(described: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"a": described}}
    tool = Tool(name="f", description=None, parameters=parameters, strict=True)
    with pytest.raises(GrammarInvalid):
        BYTES.matcher(lark(f"start: {json_value(arguments_schema(tool))}"))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{", "not JSON"),
        ('{"type": NaN}', "not JSON"),
        ("[1]", "an object or a boolean"),
        ("false", "allows nothing"),
        ('{"properties": []}', "properties has to be an object"),
        ('{"enum": []}', "anyOf is empty"),
        ('{"type": "text"}', "Invalid type: text"),
        ('{"type": "string", "minLength": 3, "maxLength": 2}', "minLength"),
        ('{"type": "integer", "minimum": 3, "maximum": 2}', "minimum"),
    ],
)
def test_a_schema_that_cannot_be_meant_is_refused(source: str, reason: str) -> None:
    with pytest.raises(GrammarInvalid, match=reason):
        WORDS.matcher(schema(source))


@pytest.mark.parametrize("number", [10**400, -(10**400), 2**53 + 1, 1e300])
def test_numbers_of_any_size_are_refused_in_order(number: float) -> None:
    for described in ({"exclusiveMinimum": number, "maximum": 1}, {"const": [number]}):
        with pytest.raises(GrammarInvalid, match="beyond"):
            matcher(described)


def test_nesting_is_limited() -> None:
    described: dict[str, Any] = {"type": "null"}
    for _ in range(MAX_DEPTH + 1):
        described = {"type": "array", "items": described}
    with pytest.raises(SchemaInvalid, match="nested"):
        read_schema(json.dumps(described))
    read_schema(json.dumps(described["items"]))


def test_true_allows_any_json() -> None:
    assert accepts(True, '{"a":[1,null]}')


SPACED = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('{"a":[1,2],"b":true}', True),
        ('{"a": [1, 2], "b": true}', True),
        ('{"a": [1,2],"b":true}', True),
        ('{"a":  [1,2]}', False),
        ('{"a":[1,  2]}', False),
        ('{ "a":[1,2]}', False),
        ('{"a" :[1,2]}', False),
        ('{"a":[1 ,2]}', False),
        ('{"a":[1,2] }', False),
        ('{"a":[1,2]} ', False),
        (' {"a":[1,2]}', False),
        ('{"a":\n[1,2]}', False),
        ('{"a":[1,\t2]}', False),
    ],
)
def test_there_is_at_most_one_space_and_only_after_a_comma_or_colon(
    text: str, is_allowed: bool
) -> None:
    assert accepts(SPACED, text) == is_allowed
    assert json.loads(text) is not None


@pytest.mark.parametrize(
    ("described", "text"),
    [
        ({"properties": {"p": {"const": True}}, "required": ["p"]}, r'{"p":true,"\u0070":0}'),
        ({"properties": {"a": False}}, r'{"\u0061":1}'),
        ({"patternProperties": {"^x": {"type": "integer"}}}, r'{"\u0078":"s"}'),
        ({"allOf": [{"properties": {"a": False}}, {"minProperties": 1}]}, r'{"\u0061":1}'),
    ],
)
def test_a_listed_name_does_not_come_again_in_escapes(described: dict[str, Any], text: str) -> None:
    described = {"type": "object", **described}
    assert problem(text, described) is not None
    assert not accepts(described, text)


@pytest.mark.parametrize("control", ["\x00", "\x1f", "\x7f"])
def test_requested_control_characters_can_be_written(control: str) -> None:
    written = f'"a\\u{ord(control):04x}"'
    assert accepts({"const": f"a{control}"}, written)
    assert not accepts({"type": "string"}, written)
    listed = {"properties": {"a": {"const": control}}}
    assert accepts({"type": "object", **listed, "additionalProperties": False}, "{}")
    with pytest.raises(GrammarInvalid, match="control characters"):
        matcher({"type": "object", **listed})


def test_a_number_is_never_at_a_bound_that_is_excluded() -> None:
    bounds = [-2, -1, -0.5, 0, 0.25, 0.5, 1, 1.5, 3]
    texts = [
        "-2",
        "-1.5",
        "-1",
        "-1.0",
        "-0.75",
        "-0",
        "-0.0",
        "0",
        "0.0",
        "0.25",
        "0.3",
        "1",
        "1.0",
        "1.25",
        "2",
        "3",
    ]
    written = {text: tokens_of(text) for text in texts}
    for low, high in product(bounds, bounds):
        if low >= high:
            continue
        for least, most in product(
            ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
        ):
            both = {"type": "number", least: low, most: high}
            apart = {"allOf": [{"type": "number", least: low}, {most: high}]}
            for described in (both, apart):
                start = matcher(described)
                for text, tokens in written.items():
                    if takes(start.copy(), tokens):
                        assert problem(text, described) is None, (described, text)
                assert takes(start, tokens_of(compact((low + high) / 2))), described


@pytest.mark.parametrize(
    ("least", "most", "allowed"),
    [(1, 2, [2]), (0, 1, [1]), (-2, -1, [-1]), (10**6, 10**6 + 1, [10**6 + 1])],
)
def test_integers_next_to_an_excluded_bound_are_right(
    least: int, most: int, allowed: list[int]
) -> None:
    described = {"type": "integer", "exclusiveMinimum": least, "maximum": most}
    assert [n for n in range(least - 1, most + 2) if accepts(described, str(n))] == allowed


@pytest.mark.parametrize(
    ("format_name", "good", "bad"),
    [
        ("time", "22:59:59Z", "22:59:60Z"),
        ("date-time", "2024-06-15T11:09:59Z", "2024-06-15T11:09:60Z"),
        ("hostname", ".".join(["a" * 63] * 3 + ["b" * 61]), ".".join(["a" * 63] * 3 + ["b" * 62])),
    ],
)
def test_formats_are_enforced_beyond_the_library(format_name: str, good: str, bad: str) -> None:
    described = {"type": "string", "format": format_name}
    assert accepts(described, f'"{good}"')
    assert not accepts(described, f'"{bad}"')


def test_a_schema_cannot_ask_for_other_spacing_or_lenience() -> None:
    described = {"x-guidance": {"lenient": True, "whitespace_flexible": True}, "type": "array"}
    assert not accepts(described, "[ 1]")
    with pytest.raises(GrammarInvalid, match="not"):
        matcher({**described, "not": {"type": "string"}})


@pytest.mark.parametrize(
    "name", ["é", "a b", "A<B>", "Page[User]", "100%", 'q"`^|{}', "%41", "日本", "C#"]
)
def test_a_name_may_be_referred_to_as_it_is(name: str) -> None:
    described = {"$ref": f"#/$defs/{name}", "$defs": {unquote(name): {"type": "integer"}}}
    assert accepts(described, "1")
    assert not accepts(described, '"1"')


def test_references_are_enforced_at_any_location() -> None:
    where = "#/components/schemas"
    schemas = {
        "Event": {"type": "object", "properties": {"on": {"$ref": f"{where}/Day[é]"}}},
        "Day[é]": {"type": "string", "format": "date"},
        "Huge": {"type": "integer", "maximum": 10**30},
    }
    described = {"$ref": f"{where}/Event", "components": {"schemas": schemas}}
    assert accepts(described, '{"on":"2024-02-29"}')
    assert not accepts(described, '{"on":"2023-02-29"}')
    with pytest.raises(GrammarInvalid, match=f"{where}/Huge/maximum"):
        matcher({**described, "$ref": f"{where}/Huge"})


def test_a_part_that_would_never_end_is_not_entered() -> None:
    described = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/endless"}, "b": {"type": "null"}},
        "additionalProperties": False,
        "$defs": {
            "endless": {
                "type": "object",
                "properties": {"x": {"$ref": "#/$defs/endless"}},
                "required": ["x"],
            }
        },
    }
    assert accepts(described, '{"b":null}')
    result = matcher(described)
    assert not result.consume_all(WORDS.split(b'{"a'))


@pytest.mark.parametrize("seed", range(3))
def test_random_schemas_never_yield_invalid_json(seed: int) -> None:
    schemas, rng = Schemas(seed), random.Random(seed)
    refused = unfinished = 0
    for _ in range(NUM_RANDOM):
        described = schemas.schema()
        try:
            result = matcher(described)
        except GrammarInvalid:
            refused += 1
            continue
        text = walk(result, WORDS, rng, most=300)
        if text is None:
            unfinished += 1
            continue
        assert problem(text.decode(), described) is None, (described, text)
    assert refused < NUM_RANDOM / 3
    assert unfinished < NUM_RANDOM / 5


def suite_groups() -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    if SUITE is None:
        return
    for path in sorted(Path(SUITE).glob("*.json")):
        for group in json.loads(path.read_text()):
            yield f"{path.stem}: {group['description']}", group["schema"], group["tests"]


def writings(value: Any) -> Iterator[Any]:
    """The same value as we write it: whole numbers without a fraction, properties in any of their orders."""
    if isinstance(value, float) and value.is_integer():
        yield int(value)
    elif isinstance(value, list):
        yield from map(list, product(*(list(writings(item)) for item in value)))
    elif isinstance(value, dict):
        for names in permutations(value):
            for items in product(*(list(writings(value[name])) for name in names)):
                yield dict(zip(names, items, strict=True))
    else:
        yield value


@pytest.mark.skipif(SUITE is None, reason="run by make test-all SUITE=fuzz")
def test_the_official_suite_is_enforced_or_refused() -> None:
    wrong, missing, refused, checked = [], [], [], 0
    for name, described, tests in suite_groups():
        try:
            matcher(described)
        except GrammarInvalid as error:
            refused.append((name, str(error)))
            continue
        for test in tests:
            checked += 1
            title = f"{name}: {test['description']}"
            ways = islice(writings(test["data"]), MOST_WRITINGS)
            is_accepted = any(accepts(described, compact(value)) for value in ways)
            if is_accepted and not test["valid"]:
                wrong.append(title)
            # A format is more than an annotation here.
            elif test["valid"] and not is_accepted and not title.startswith("format: "):
                missing.append(title)
    if (report := os.environ.get("JSON_SCHEMA_REPORT")) is not None:
        result = {"checked": checked, "wrong": wrong, "missing": missing, "refused": refused}
        Path(report).write_text(json.dumps(result, indent=1))
    assert not wrong
    assert not missing
    assert checked > 600


BYTES = Words([bytes([byte]) for byte in range(256)], size=300)
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


def consumes_all(matcher: Matcher, text: str) -> bool:
    return matcher.consume_all([*BYTES.split(text.encode()), BYTES.eos[0]]) and matcher.has_ended


@pytest.mark.parametrize(("described", "good", "bad"), KEPT)
def test_a_schema_in_a_grammar_is_kept_to_the_letter(
    described: dict[str, Any], good: str, bad: str
) -> None:
    assert problem(good, described) is None
    assert problem(bad, described) is not None
    grammar = lark(f'start: "it: " it // %json {{\nit: %json {json.dumps(described)}\n')
    assert consumes_all(BYTES.matcher(grammar), f"it: {good}")
    assert not consumes_all(BYTES.matcher(grammar), f"it: {bad}")


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("described", "good", "bad"), KEPT)
def test_arguments_of_tools_are_kept_to_the_letter(
    described: dict[str, Any], good: str, bad: str, *, strict: bool
) -> None:
    parameters = {"type": "object", "properties": {"a": described}, "required": ["a"]}
    tool = Tool("tool", None, parameters, strict=strict)
    grammar = lark(f"start: {json_value(arguments_schema(tool))}")
    assert consumes_all(BYTES.matcher(grammar), f'{{"a":{good}}}')
    assert not consumes_all(BYTES.matcher(grammar), f'{{"a":{bad}}}')


def test_unenforceable_schemas_are_refused_unless_lenient() -> None:
    endless = {"$ref": "#"}
    with pytest.raises(GrammarInvalid, match="refers to itself"):
        BYTES.matcher(lark(f"start: %json {json.dumps(endless)}"))
    huge = {"type": "integer", "maximum": 10**20}
    with pytest.raises(GrammarInvalid, match="2\\*\\*53"):
        BYTES.matcher(lark(f"start: %json {json.dumps(huge)}"))
    lenient = {**huge, "x-guidance": {"lenient": True}}
    assert consumes_all(BYTES.matcher(lark(f"start: %json {json.dumps(lenient)}")), "7")


def test_a_grammar_may_ask_for_other_spacing() -> None:
    described = {"type": "array", "x-guidance": {"whitespace_flexible": False}}
    grammar = lark(f"start: %json {json.dumps(described)}")
    assert consumes_all(BYTES.matcher(grammar), "[1,2]")
    assert not consumes_all(BYTES.matcher(grammar), "[1, 2]")


@pytest.mark.parametrize("of", ["[1]", '"lenient"'])
def test_options_of_the_library_must_be_an_object(of: str) -> None:
    with pytest.raises(GrammarInvalid, match="x-guidance"):
        BYTES.matcher(lark(f'start: %json {{"x-guidance": {of}}}'))


@pytest.mark.parametrize("broken", ["{", '{"type": }', "{'a': 1}"])
def test_texts_that_are_not_json_are_refused(broken: str) -> None:
    with pytest.raises(GrammarInvalid):
        BYTES.matcher(lark(f"start: %json {broken}"))


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
def test_schemas_next_to_special_tokens_and_expressions_are_replaced(
    pieces: tuple[str, str],
) -> None:
    described = json.dumps({"type": "string", "format": "date"})
    exact = with_exact_schemas(f"%json {described}").removeprefix("%json ")
    assert exact != described
    assert with_exact_schemas(described.join(pieces)) == exact.join(pieces)


LITERALS = st.text(st.sampled_from([*string.ascii_letters, *'{}%"/\\#\n ']), max_size=20)
DATE = {"type": "string", "format": "date"}


@given(before=LITERALS, between=LITERALS)
def test_schemas_between_any_literals_are_replaced(before: str, between: str) -> None:
    """Every schema is replaced, and nothing else."""
    described = json.dumps(DATE)
    pieces = [f"start: {json.dumps(before)} %json ", f" {json.dumps(between)} %json\n", ' "z"']
    exact = with_exact_schemas(f"%json {described}").removeprefix("%json ")
    assert exact != described
    assert with_exact_schemas(described.join(pieces)) == exact.join(pieces)
