"""Random schemas follow from their seed, and a third-party validator judges texts."""

from __future__ import annotations

import pytest
from bench.structured_output.schemas import problem

from millrace_testing.engines.random_schemas import Schemas, bodies

SCHEMA = {"type": "object", "properties": {"a": {"type": "number", "multipleOf": 0.01}}}


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
    assert (problem(text, SCHEMA) is None) == is_valid


def test_requests_sample_under_their_schemas_with_a_seed() -> None:
    made = list(bodies(5, "x"))
    assert made == list(bodies(5, "x"))
    for number, (schema, body) in enumerate(made):
        parameters = body["parameters"]
        assert parameters["grammar"]["value"]["schema"] == schema
        assert (parameters["do_sample"], parameters["seed"]) == (True, number)
