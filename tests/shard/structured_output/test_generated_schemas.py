"""Schemas as generators of schemas write them: what is accepted is what an independent validator accepts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
from bench.structured_output.schemas import problem

from millrace_shard.structured_output.grammar_source import GrammarInvalid
from millrace_shard.structured_output.matcher import Matcher
from millrace_testing.engines.grammars import Words, schema

BYTES = Words([bytes([byte]) for byte in range(256)], size=300)


def compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def matcher(described: object) -> Matcher:
    return BYTES.matcher(schema(json.dumps(described)))


def takes(start: Matcher, text: str) -> bool:
    """Whether the text is a whole answer."""
    one = start.copy()
    return one.consume_all([*BYTES.split(text.encode()), BYTES.eos[0]]) and one.has_ended


DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
COLOUR = {"$defs": {"Colour": {"enum": ["red", "blue"], "title": "Colour", "type": "string"}}}
INTEGER = {"type": "integer"}
COUNT = {"type": "object", "additionalProperties": {"type": "integer"}}
GENERATED: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "zod record": ({**COUNT, "propertyNames": {"type": "string"}}, [{"a": 1}], [{"a": "b"}]),
    "any names": ({**COUNT, "propertyNames": True}, [{"a": 1}], [{"a": "b"}]),
    "pydantic dict of a literal": (
        {**COUNT, "propertyNames": {"enum": ["a", "b"]}},
        [{}, {"b": 1}, {"a": 1, "b": 2}],
        [{"c": 1}, {"a": "x"}],
    ),
    "pydantic dict of an enum": (
        {**COLOUR, **COUNT, "propertyNames": {"$ref": "#/$defs/Colour"}},
        [{"blue": 1}],
        [{"green": 1}],
    ),
    "names that match a pattern": (
        {**COUNT, "propertyNames": {"pattern": "^x-"}},
        [{"x-a": 1}],
        [{"a": 1}],
    ),
    "names of a length": (
        {**COUNT, "propertyNames": {"minLength": 2, "maxLength": 3}},
        [{"ab": 1}, {"ab\n": 1}],
        [{"a": 1}, {"abcd": 1}],
    ),
    "constants with titles": (
        {"oneOf": [{"const": 1, "title": "one"}, {"const": "1"}, {"enum": [None, True]}]},
        [1, "1", None, True],
        [2, False, "2"],
    ),
    "schemars' variants": (
        {
            "$defs": {"B": {"type": "string", "enum": ["b", "c"]}},
            "oneOf": [{"description": "d", "type": "string", "enum": ["a"]}, {"$ref": "#/$defs/B"}],
        },
        ["a", "c"],
        ["d", 1],
    ),
    "pydantic's Decimal": (
        {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]},
        [1.5, "1", "-1.5", "+.5", "007.", "0"],
        ["", ".", "-", "+.", "1.5.", "x", "--1"],
    ),
    "optional in zod": ({"anyOf": [{"type": "string"}, {"not": {}}]}, ["a"], [1]),
    "never in zod": (
        {"type": "object", "properties": {"a": {}, "b": {"not": {}}}, "required": ["a"]},
        [{"a": 1}],
        [{"a": 1, "b": 1}],
    ),
    "never by reference": (
        {"$defs": {"N": {"not": True}}, "anyOf": [{"$ref": "#/$defs/N"}, {"type": "integer"}]},
        [1],
        ["a"],
    ),
    "no further properties": (
        {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
        [{"a": 1}],
        [{"b": 1}],
    ),
    "what a base class has and no more": (
        {
            "$defs": {"Base": {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}},
            "allOf": [{"$ref": "#/$defs/Base"}, {"properties": {"b": {"type": "integer"}}}],
            "properties": {"c": {}},
            "unevaluatedProperties": False,
        },
        [{"a": 1}, {"a": 1, "b": 2}, {"a": 1, "c": 0}],
        [{"b": 1}, {"a": 1, "d": 1}, {"a": 1, "b": "x"}],
    ),
    "a class that may be absent and no more": (
        {
            "$defs": {"Base": {"type": "object", "properties": {"a": INTEGER}}},
            "anyOf": [{"$ref": "#/$defs/Base"}, {"type": "null"}],
            "unevaluatedProperties": {"not": {}},
        },
        [None, {}, {"a": 1}],
        [{"b": 1}, {"a": "x"}, 1],
    ),
    "further properties of a type": (
        {
            "type": "object",
            "allOf": [{"properties": {"a": {"type": "string"}}}],
            "unevaluatedProperties": {"type": "integer"},
        },
        [{"a": "x"}, {"a": "x", "b": 1}],
        [{"a": 1}, {"b": "x"}],
    ),
    "patterns on both sides": (
        {
            "type": "object",
            "patternProperties": {"^x": {"type": "integer"}},
            "allOf": [{"patternProperties": {"^y": {"type": "integer"}}}],
            "unevaluatedProperties": False,
        },
        [{"x1": 1}, {"y1": 1}],
        [{"x1": "a"}, {"y1": "a"}, {"z": 1}],
    ),
    "nothing left to evaluate": (
        {
            "allOf": [{"type": "object", "additionalProperties": {"type": "integer"}}],
            "unevaluatedProperties": False,
        },
        [{"a": 1}],
        [{"a": "x"}],
    ),
    **{
        f"format {name}": ({"type": "string", "format": name}, ["x y"], [1])
        for name in (
            *("binary", "byte", "password", "path", "uri-reference", "idn-email", "regex", "cuid"),
            *("iri-reference-of-mine", "unknown"),
        )
    },
    "format int32": ({"type": "integer", "format": "int32"}, [1], ["1"]),
}


@pytest.mark.parametrize("name", GENERATED)
def test_schemas_that_generators_write_are_enforced(name: str) -> None:
    described, valid, invalid = GENERATED[name]
    for instance in (*valid, *invalid):
        is_valid = problem(compact(instance), described) is None
        assert is_valid == (instance in valid), instance
        assert takes(matcher(described), compact(instance)) == is_valid, instance


def some_object(rng: random.Random, depth: int) -> dict[str, Any]:
    """An object's schema with parts that hold for the same object, up to `depth` within each other."""
    made: dict[str, Any] = {
        "properties": {name: rng.choice([{}, INTEGER]) for name in rng.sample("abcd", 2)}
    }
    likely: dict[str, tuple[float, Callable[[], object]]] = {
        "type": (0.8, lambda: "object"),
        "patternProperties": (0.2, lambda: {"^" + rng.choice("xy"): INTEGER}),
        "required": (0.2, lambda: [rng.choice("abcd")]),
        "additionalProperties": (0.1, lambda: rng.choice([True, INTEGER])),
        "allOf": (0.7 * (depth > 0), lambda: [some_object(rng, depth - 1) for _ in "12"]),
        "anyOf": (0.2 * (depth > 0), lambda: [some_object(rng, 0), {"type": "null"}]),
        "$ref": (0.3 * (depth > 0), lambda: "#/$defs/" + rng.choice("PQ")),
        "unevaluatedProperties": (
            0.9 if depth == 2 else 0.1,
            lambda: rng.choice([False, True, INTEGER]),
        ),
    }
    return made | {name: make() for name, (share, make) in likely.items() if rng.random() < share}


@pytest.mark.parametrize("seed", range(25))
def test_properties_that_are_left_are_those_of_the_standard(seed: int) -> None:
    rng = random.Random(seed)
    described = some_object(rng, 2)
    described["$defs"] = {"P": some_object(rng, 0), "Q": some_object(rng, 0)}
    try:
        start = matcher(described)
    except GrammarInvalid:
        return
    for _ in range(12):
        names = rng.sample(["a", "b", "c", "d", "x1", "y1", "z"], rng.randint(0, 3))
        instance = {name: rng.choice([1, "s"]) for name in names}
        texts = [compact(dict(order)) for order in permutations(instance.items())]
        is_accepted = any(takes(start, text) for text in texts)
        assert is_accepted == (problem(texts[0], described) is None), (described, instance)


def test_options_with_a_constant_in_common_are_refused() -> None:
    with pytest.raises(GrammarInvalid, match="#/oneOf: "):
        matcher({"oneOf": [{"const": 1}, {"enum": [1.0, 2]}]})
