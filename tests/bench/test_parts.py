"""Lengths, arrival times and what is made of the moments at which tokens came."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from bench.harness.checkpoints import build_tokenizer
from bench.parts.client import (
    Answer,
    Client,
    Request,
    RequestsFailed,
    closed_loop,
    open_loop,
    succeeded,
)
from bench.parts.simulation import TimedEngine, simulate
from bench.parts.texts import Texts
from bench.parts.workloads import exponential_lengths, poisson_seconds, saturated_rate
from bench.policies.static_planner import NaiveEngine, StaticEngine
from tokenizers import Tokenizer

from millrace.simulate.deployment import Deployment
from millrace_launcher import __file__ as launcher_file
from millrace_testing.router.sse import FakeServer, event, served, served_application, whole_stream

REQUEST = Request(prompt=" ab", prompt_tokens=1, output_tokens=3)


def answer(due: float, *arrivals: float, ended: float = 0.0, num_tokens: int = 0) -> Answer:
    return Answer(
        REQUEST,
        due,
        list(arrivals),
        ended=ended or (arrivals[-1] if arrivals else due),
        num_tokens=num_tokens or len(arrivals),
    )


def test_poisson_arrivals_are_in_order_and_keep_their_rate() -> None:
    moments = poisson_seconds(20.0, 4000, seed="a")
    assert moments == sorted(moments)
    assert moments[-1] == pytest.approx(200.0, rel=0.05)
    gaps = [b - a for a, b in pairwise(moments)]
    assert statistics.stdev(gaps) == pytest.approx(statistics.fmean(gaps), rel=0.1)


def test_exponential_lengths_have_their_mean_and_deviation_and_caps_cut_the_same_draws() -> None:
    lengths = exponential_lengths(20_000, mean=128, most=10_000, seed="a")
    assert statistics.fmean(lengths) == pytest.approx(128, rel=0.03)
    assert statistics.stdev(lengths) == pytest.approx(128, rel=0.03)
    assert min(lengths) == 1
    capped = exponential_lengths(20_000, mean=128, most=100, seed="a")
    assert capped == [min(100, length) for length in lengths]


def test_the_saturated_rate_ignores_how_a_burst_begins_and_ends() -> None:
    # Nothing for ten seconds, then one every half second, then stragglers.
    ends = [10.0, *(10.0 + 0.5 * n for n in range(1, 15)), 40.0, 80.0, 160.0]
    assert saturated_rate([answer(0.0, ended=end) for end in ends]) == pytest.approx(2.0)


ASKED = Request(prompt=" ab cd", prompt_tokens=2, output_tokens=4)


async def test_every_token_is_stamped_in_order() -> None:
    fake = FakeServer(whole_stream)
    async with served(fake) as url, Client(url) as client:
        (answer,) = succeeded(await open_loop(client, [ASKED]))
    assert len(answer.arrivals) == answer.num_tokens == 4
    assert answer.due <= answer.arrivals[0]
    assert answer.arrivals == sorted(answer.arrivals)
    assert answer.arrivals[-1] <= answer.ended


async def test_an_open_loop_sends_in_order_of_due_times_and_waits_for_no_answer() -> None:
    fake = FakeServer(whole_stream, hold=3)
    asked = [replace(ASKED, prompt=f" {due}", due=due) for due in (0.02, 0.0, 0.01)]
    async with served(fake) as url, Client(url) as client:
        answers = succeeded(await open_loop(client, asked))
    assert [answer.request.due for answer in answers] == [0.0, 0.01, 0.02]
    assert answers[2].due - answers[0].due == pytest.approx(0.02)
    assert fake.most_at_once == 3


async def test_a_closed_loop_keeps_its_clients_busy_and_sends_each_request_once() -> None:
    fake = FakeServer(whole_stream, hold=2)
    asked = [replace(ASKED, prompt=f" {number}") for number in range(6)]
    async with served(fake) as url, Client(url) as client:
        succeeded(await closed_loop(client, asked, num_clients=2))
    assert fake.most_at_once == 2
    assert sorted(body["inputs"] for body in fake.bodies) == [f" {n}" for n in range(6)]


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([event(1, last=True)], "asked for 4 tokens, got 1"),
        ([b'data: {"error":"no","error_type":"overloaded"}\n\n'], "overloaded: no"),
        ([event(1, last=False)[:-4]], "inside an event"),
    ],
)
async def test_a_stream_that_is_not_whole_is_a_failure(pieces: list[bytes], reason: str) -> None:
    async with served(FakeServer(lambda _: pieces)) as url, Client(url) as client:
        answers = await open_loop(client, [ASKED])
    with pytest.raises(RequestsFailed, match=reason):
        succeeded(answers)


async def test_a_refusal_is_a_failure_with_its_status() -> None:
    application = web.Application()
    async with served_application(application) as url, Client(url) as client:
        answers = await open_loop(client, [ASKED, replace(ASKED, streams=False)])
    with pytest.raises(RequestsFailed, match=r"2 of 2 requests failed: .*status 404"):
        succeeded(answers)


LENGTHS = (2, 4, 3)


def deployment(**changes: Any) -> Deployment:
    """Every step takes a second, whatever it computes."""
    coefficients = ("decode_row", "decode_context_token", "prefill_step", "prefill_token")
    values = {
        "cost_model": {"step": 1.0, "prefill_pair": 0.0, **dict.fromkeys(coefficients, 0.0)},
        "num_blocks": 100,
        "block_size": 16,
        "max_total_tokens": 64,
        "max_batch_size": 2,
        "steps_in_flight": 1,
        **changes,
    }
    return Deployment.model_validate(values)


def requests(*, due: float = 0.0) -> list[Request]:
    return [
        Request(prompt="", prompt_tokens=8, output_tokens=length, due=due) for length in LENGTHS
    ]


@pytest.mark.parametrize(
    ("engine", "batch_size", "seconds"),
    [
        # The third request takes the slot of the first.
        (TimedEngine, 2, [2.0, 4.0, 5.0]),
        # It waits until both have ended.
        (StaticEngine, 2, [2.0, 4.0, 7.0]),
        (NaiveEngine, 2, [2.0, 4.0, 7.0]),
        (TimedEngine, 1, [2.0, 6.0, 9.0]),
    ],
)
def test_requests_end_when_their_policy_lets_them(
    engine: type[TimedEngine], batch_size: int, seconds: list[float]
) -> None:
    outcomes = simulate(deployment(max_batch_size=batch_size), requests(), engine)
    assert [outcome.seconds for outcome in outcomes] == pytest.approx(seconds)


DEMO = Path(launcher_file).parents[2] / "demo" / "model" / "tokenizer.json"


@pytest.fixture(scope="module", params=["bench", "demo"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "demo":
        return Tokenizer.from_file(str(DEMO))
    return build_tokenizer(32768)


@pytest.mark.parametrize("num_tokens", [2, 3, 64, 1000])
def test_a_prompt_has_exactly_so_many_tokens(tokenizer: Tokenizer, num_tokens: int) -> None:
    prompt = Texts(tokenizer).prompt(num_tokens, seed="a")
    assert len(tokenizer.encode(prompt).ids) == num_tokens
