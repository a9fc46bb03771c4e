"""The bench of structured output checks answers and computes its figures; no server is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from bench.harness.repeats import Repeated, Sample
from bench.parts.client import Answer, Request
from bench.parts.fixture import Fixture
from bench.parts.part import Case
from bench.structured_output import batch_composition, validity
from bench.structured_output.schemas import Schemas, problem
from bench.structured_output.workloads import PEOPLE, GrammarRequest

from millrace_testing.router.sse import served_application

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


def test_a_request_with_a_grammar_asks_for_json_of_its_schema() -> None:
    request = GrammarRequest(prompt="x", prompt_tokens=1, output_tokens=7, schema=PEOPLE)
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


def _table(part: Any, **rounds: Sequence[Sequence[float]]) -> dict[str, dict[str, Repeated]]:
    return {
        case.name: {
            title: Repeated(tuple(Sample(each[index], 0.0) for each in taken))
            for title, taken in rounds.items()
        }
        for index, case in enumerate(part.cases)
    }


def test_conclusions_are_medians_of_ratios_of_turns() -> None:
    """On a machine that became four times as slow: the ratio of medians would be another."""
    turns = [(2.0, 3.0, 2.0), (8.0, 12.0, 8.0), (8.0, 8.0, 10.0)]
    titles = batch_composition.MEAN, batch_composition.WORST
    table = _table(batch_composition.BESIDE, **dict.fromkeys(titles, turns))
    with_grammar, again = batch_composition.BESIDE.conclude(table)
    assert "1.500 times" in with_grammar
    assert "quartiles 1.250 to 1.500 of 3 turns" in with_grammar
    assert "1.50 times at p99" in with_grammar
    assert "1.000 times" in again
    rates = _table(
        batch_composition.RATES,
        **{batch_composition.RATE: [(400.0, 300.0), (100.0, 75.0), (90.0, 90.0)]},
    )
    assert "0.75" in batch_composition.RATES.conclude(rates)[0]


def _running(begin: int, end: int, period: float = 1.0) -> Answer:
    """An answer with a token every `period` seconds."""
    request = Request(prompt="x", prompt_tokens=1, output_tokens=1)
    return Answer(request, 0.0, arrivals=[period * step for step in range(begin, end)])


def test_only_steps_beside_a_companion_count() -> None:
    """Steps take a second, but for four that take ten: before it has settled, and from its end on."""
    seconds = [10.0 if step in {3, 20, 41, 42} else 1.0 for step in range(60)]
    other = _running(0, 0)
    other.arrivals = list(accumulate(seconds))
    companion = _running(0, 0)
    # Its own token comes last in every step.
    companion.arrivals = [moment + 0.1 for moment in other.arrivals[:41]]
    found = batch_composition.beside([other, other], companion)
    num_steps = 39 - batch_composition.SETTLED_TOKENS + 1
    assert found[batch_composition.MEAN] == pytest.approx(1000 * (num_steps - 1 + 10.0) / num_steps)
    assert found[batch_composition.WORST] > 9000


def test_turns_count_while_all_others_run() -> None:
    others = [_running(0, 500), _running(20, 400)]
    within = {"a": _running(40, 90), "b": _running(90, 140)}
    before = {"a": _running(25, 75), "b": _running(90, 140)}
    after = {"a": _running(340, 390), "b": _running(390, 440)}
    (found,) = batch_composition.measured(others, [before, within, after])
    assert found == {
        name: batch_composition.beside(others, answer) for name, answer in within.items()
    }


class _Fixture:
    """Serves nothing, and is as busy as it says."""

    other_cores = 0.0
    repeat = 0

    def sized(self, full: int, quick: int) -> int:
        return full

    @contextmanager
    def serving(self) -> Iterator[Any]:
        yield SimpleNamespace(url="http://here")
        self.other_cores = 0.5


def test_turns_share_a_server_and_the_first_round_does_not_count() -> None:
    asked: list[tuple[str, int]] = []

    def turns(fixture: Fixture, url: str, number: int) -> list[batch_composition.Turn]:
        asked.append((url, number))
        return [{"a": {"x": float(number)}, "b": {"x": 0.5}}] * 2

    part = batch_composition.InTurn(
        name="p", title="P", method="", cases=(Case("a"), Case("b")), turns=turns
    )
    table = part.measure(cast("Fixture", _Fixture()), repeats=1)
    assert asked == [("http://here", number) for number in range(batch_composition.ROUNDS + 1)]
    numbers = range(1, batch_composition.ROUNDS + 1)
    assert [sample.value for sample in table["a"]["x"].samples] == [
        n for n in numbers for _ in "ab"
    ]
    assert not table["b"]["x"].is_clean
