"""What counts as whole and valid among answers under everyday schemas."""

from __future__ import annotations

import jsonschema
import pytest
from bench.structured_output import everyday
from bench.structured_output.schemas import problem

from millrace_testing.engines.random_schemas import Schemas, bodies

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def test_there_are_fifty_schemas_with_a_question_each() -> None:
    asked = everyday.everyday()
    assert len(asked) == 50
    assert len({question for question, _ in asked}) == 50
    for _, schema in asked:
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("text", "reason", "outcome"),
    [
        ('{"a": 1}', "stop", everyday.ENDED),
        ('{"a": 1}', "length", everyday.CLOSED),
        ('{"a": 1, "b', "length", everyday.CUT),
        ('{"a": 1, "b": 2}', "stop", everyday.INVALID),
        ('{"a": "1"}', "stop", everyday.INVALID),
        ('{"a": 1', "stop", everyday.INVALID),
    ],
)
def test_each_answer_has_its_outcome(text: str, reason: str, outcome: str) -> None:
    assert everyday.outcome_of(text, reason, SCHEMA) == outcome


CHECKED_SCHEMA = {"type": "object", "properties": {"a": {"type": "number", "multipleOf": 0.01}}}


def test_the_same_seed_makes_the_same_schemas_and_another_one_others() -> None:
    first, same, other = (Schemas(seed) for seed in (1, 1, 2))
    made = [first.schema() for _ in range(20)]
    assert made == [same.schema() for _ in range(20)]
    assert made != [other.schema() for _ in range(20)]


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [('{"a": 0.07}', True), ('{"a": 0.075}', False), ('{"a":', False), ('{"a": "x"}', False)],
)
def test_a_text_is_judged_as_the_decimals_it_says(text: str, is_valid: bool) -> None:
    assert (problem(text, CHECKED_SCHEMA) is None) == is_valid


def test_requests_sample_under_their_schemas_with_a_seed() -> None:
    made = list(bodies(5, "x"))
    assert made == list(bodies(5, "x"))
    for number, (schema, body) in enumerate(made):
        parameters = body["parameters"]
        assert parameters["grammar"]["value"]["schema"] == schema
        assert (parameters["do_sample"], parameters["seed"]) == (True, number)
