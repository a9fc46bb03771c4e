"""What the guidance bench counts as valid, and how it takes its figures, without a server."""

from __future__ import annotations

import random
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from bench.guidance import company, libraries, validity
from bench.guidance.schemas import Schemas, problem
from bench.guidance.workloads import PEOPLE, GuidedRequest
from bench.repeats import Repeated, Sample

from millrace_fakes_sse import served_application

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


def test_a_guided_request_asks_for_json_of_its_schema() -> None:
    request = GuidedRequest(prompt="x", prompt_tokens=1, output_tokens=7, schema=PEOPLE)
    parameters = request.body()["parameters"]
    assert parameters["grammar"] == {"type": "json", "value": PEOPLE}
    assert parameters["max_new_tokens"] == 7


def _answer(text: str, reason: str = "eos_token") -> dict[str, Any]:
    return {"generated_text": text, "details": {"finish_reason": reason}}


@pytest.mark.parametrize(
    ("status", "answer", "outcome"),
    [
        (200, _answer("{}"), "valid"),
        (200, _answer('{"a', "length"), "cut off"),
        (422, {"error": "no"}, "refused"),
        (200, _answer('{"a'), "no JSON"),
        (200, _answer('{"a": true}'), "not of type"),
        (500, {"error": "oh"}, "status 500"),
    ],
)
async def test_what_becomes_of_a_request(status: int, answer: dict[str, Any], outcome: str) -> None:
    async def generate(_: web.Request) -> web.Response:
        return web.json_response(answer, status=status)

    application = web.Application()
    application.router.add_post("/generate", generate)
    async with (
        served_application(application) as url,
        aiohttp.ClientSession(base_url=url) as session,
    ):
        assert outcome in await validity.ask(session, SCHEMA, {})


def _table(part: Any, **values: tuple[float, ...]) -> dict[str, dict[str, Repeated]]:
    return {
        case.name: {
            title: Repeated((Sample(taken[index], 0.0),)) for title, taken in values.items()
        }
        for index, case in enumerate(part.cases)
    }


def test_conclusions_are_ratios_of_the_two_cases() -> None:
    beside = _table(company.COMPANY, **{company.MEDIAN: (2.0, 3.0), company.WORST: (4.0, 5.0)})
    assert "1.50 times" in company.COMPANY.conclude(beside)[0]
    rates = _table(company.RATES, **{company.RATE: (400.0, 300.0)})
    assert "0.75" in company.RATES.conclude(rates)[0]


def test_walks_take_only_what_is_allowed_and_time_every_step() -> None:
    library = libraries.Llguidance([b"", b"", b"n", b"u", b"l", b"null"], [0], 0)
    followed = library.compile({"type": "null"})()
    fills, accepts = libraries.follow(followed, 6, random.Random(1))
    assert len(fills) == len(accepts) >= 2
    with pytest.raises(ValueError, match="not"):
        library.compile({"not": {}})
