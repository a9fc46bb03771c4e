"""What the guidance bench counts as valid, and how it takes its figures, without a server."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from bench.guidance import company, libraries, validity
from bench.guidance.schemas import Schemas, problem
from bench.guidance.workloads import PEOPLE, GuidedRequest
from bench.repeats import Repeated, Sample
from bench.scheduling.lab import Lab
from bench.scheduling.part import Case

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


def _table(part: Any, **rounds: list[tuple[float, float]]) -> dict[str, dict[str, Repeated]]:
    return {
        case.name: {
            title: Repeated(tuple(Sample(each[index], 0.0) for each in taken))
            for title, taken in rounds.items()
        }
        for index, case in enumerate(part.cases)
    }


def test_conclusions_are_medians_of_ratios_of_rounds_side_by_side() -> None:
    """On a machine that became four times as slow: the ratio of medians would be another."""
    rounds = [(2.0, 3.0), (8.0, 12.0), (8.0, 8.0)]
    titles = company.MEAN, company.MEDIAN, company.WORST
    (beside,) = company.COMPANY.conclude(_table(company.COMPANY, **dict.fromkeys(titles, rounds)))
    assert beside.count("1.50") == 3
    rates = _table(company.RATES, **{company.RATE: [(400.0, 300.0), (100.0, 75.0), (90.0, 90.0)]})
    assert "0.75" in company.RATES.conclude(rates)[0]


class _Lab:
    """Serves nothing, and is as busy as it says."""

    other_cores = 0.0
    repeat = 0

    def sized(self, full: int, quick: int) -> int:
        return full

    @contextmanager
    def serving(self) -> Iterator[Any]:
        yield SimpleNamespace(url="http://here")
        self.other_cores = 0.5


def test_cases_take_turns_on_one_server_and_the_first_round_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, int]] = []

    def ask(lab: Any, case: Case, url: str, number: int) -> Any:
        asked.append((case.name, number))
        return [number]

    monkeypatch.setattr(company, "ask", ask)
    part = company.InTurn(
        name="p",
        title="P",
        method="",
        cases=(Case("a"), Case("b")),
        figures=lambda answers: {"x": float(cast("list[Any]", answers)[0])},
    )
    table = part.measure(cast("Lab", _Lab()), repeats=1)
    assert asked[:6] == [("b", 0), ("a", 0), ("a", 1), ("b", 1), ("b", 2), ("a", 2)]
    for row in table.values():
        assert [sample.value for sample in row["x"].samples] == list(range(1, company.ROUNDS + 1))
        assert not row["x"].is_clean


def test_walks_take_only_what_is_allowed_and_time_every_step() -> None:
    library = libraries.Llguidance([b"", b"", b"n", b"u", b"l", b"null"], [0], 0)
    followed = library.compile({"type": "null"})()
    fills, accepts = libraries.follow(followed, 6, random.Random(1))
    assert len(fills) == len(accepts) >= 2
    with pytest.raises(ValueError, match="not"):
        library.compile({"not": {}})
