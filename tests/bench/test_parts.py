"""Lengths, arrival times and what is made of the moments at which tokens came."""

from __future__ import annotations

import asyncio
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
from bench.parts.simulation import SimulationFailed, TimedEngine, simulate
from bench.parts.texts import Texts
from bench.parts.workloads import (
    exponential_lengths,
    gaps_within,
    milliseconds,
    poisson_seconds,
    saturated_rate,
    uniform_lengths,
)
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


def test_the_same_seed_gives_the_same_workload_and_another_one_another() -> None:
    def drawn(seed: str) -> tuple[list[float], list[int]]:
        return (
            poisson_seconds(1.0, 20, seed=seed),
            uniform_lengths(20, least=1, most=100, seed=seed),
        )

    assert drawn("a") == drawn("a")
    assert all(one != other for one, other in zip(drawn("a"), drawn("b"), strict=True))


def test_exponential_lengths_have_their_mean_and_deviation_and_caps_cut_the_same_draws() -> None:
    lengths = exponential_lengths(20_000, mean=128, most=10_000, seed="a")
    assert statistics.fmean(lengths) == pytest.approx(128, rel=0.03)
    assert statistics.stdev(lengths) == pytest.approx(128, rel=0.03)
    assert min(lengths) == 1
    capped = exponential_lengths(20_000, mean=128, most=100, seed="a")
    assert capped == [min(100, length) for length in lengths]


def test_uniform_lengths_reach_both_ends() -> None:
    lengths = uniform_lengths(500, least=3, most=7, seed="a")
    assert set(lengths) == {3, 4, 5, 6, 7}


@pytest.mark.parametrize(
    ("begin", "end", "gaps"),
    [
        (0.0, 9.0, [1.0, 2.0, 4.0]),
        # A pause that began before the window, or outlasts it, is felt in it.
        (2.5, 2.6, [2.0]),
        (1.5, 4.5, [1.0, 2.0, 4.0]),
        # Windows that only touch a gap do not hold it.
        (2.0, 4.0, [2.0]),
        (8.0, 9.0, []),
        (0.0, 1.0, []),
    ],
)
def test_gaps_count_where_any_of_them_lies_in_the_window(
    begin: float, end: float, gaps: list[float]
) -> None:
    assert list(gaps_within([1.0, 2.0, 4.0, 8.0], begin, end)) == gaps


def test_a_stream_of_one_token_has_no_gap() -> None:
    assert list(gaps_within([1.0], 0.0, 2.0)) == []


def test_milliseconds_are_interpolated_between_ranks() -> None:
    assert milliseconds([0.3, 0.1, 0.2], 0.5, 0.75, 1.0) == pytest.approx((200.0, 250.0, 300.0))


def test_the_saturated_rate_ignores_how_a_burst_begins_and_ends() -> None:
    # Nothing for ten seconds, then one every half second, then stragglers.
    ends = [10.0, *(10.0 + 0.5 * n for n in range(1, 15)), 40.0, 80.0, 160.0]
    assert saturated_rate([answer(0.0, ended=end) for end in ends]) == pytest.approx(2.0)


ASKED = Request(prompt=" ab cd", prompt_tokens=2, output_tokens=4)


async def test_every_token_is_stamped_in_order_and_headers_are_kept() -> None:
    fake = FakeServer(whole_stream)
    async with served(fake) as url, Client(url) as client:
        (answer,) = succeeded(await open_loop(client, [ASKED]))
    assert len(answer.arrivals) == answer.num_tokens == 4
    assert answer.due <= answer.arrivals[0]
    assert answer.arrivals == sorted(answer.arrivals)
    assert answer.arrivals[-1] <= answer.ended
    assert answer.headers["content-type"] == "text/event-stream"


async def test_a_client_that_says_no_length_hangs_up_after_its_last_token() -> None:
    left = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert "max_new_tokens" not in body["parameters"]
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            for index in range(1, 1_000_000):
                await response.write(event(index, last=False))
                await asyncio.sleep(0)
        except (ConnectionError, asyncio.CancelledError):
            left.set()
            raise
        return response

    application = web.Application()
    application.router.add_post("/generate_stream", endless)
    async with served_application(application) as url, Client(url) as client:
        (answer,) = succeeded(await open_loop(client, [replace(ASKED, says_length=False)]))
        async with asyncio.timeout(30):
            await left.wait()
    assert answer.num_tokens == len(answer.arrivals) == 4


async def test_an_answer_in_one_piece_has_its_length_and_headers_and_no_arrivals() -> None:
    bodies: list[dict[str, Any]] = []

    async def generate(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        details = {"generated_tokens": 4}
        return web.json_response({"details": details}, headers={"x-queue-time": "12"})

    application = web.Application()
    application.router.add_post("/generate", generate)
    async with served_application(application) as url, Client(url) as client:
        (answer,) = succeeded(await open_loop(client, [replace(ASKED, streams=False)]))
    assert (answer.num_tokens, answer.arrivals) == (4, [])
    assert answer.headers["X-Queue-Time"] == "12"
    assert bodies[0]["inputs"] == " ab cd"
    assert bodies[0]["parameters"]["max_new_tokens"] == 4


async def test_requests_carry_their_headers() -> None:
    seen: list[str | None] = []

    async def generate(request: web.Request) -> web.Response:
        seen.append(request.headers.get("x-tenant"))
        return web.json_response({"details": {"generated_tokens": 4}})

    application = web.Application()
    application.router.add_post("/generate", generate)
    asked = replace(ASKED, streams=False, headers={"x-tenant": "small"})
    async with served_application(application) as url, Client(url) as client:
        succeeded(await open_loop(client, [asked]))
    assert seen == ["small"]


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


def test_answers_without_an_error_pass() -> None:
    answers = [Answer(ASKED, 0.0)]
    assert succeeded(answers) is answers


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


def test_latency_counts_from_the_arrival_with_what_the_router_takes() -> None:
    outcomes = simulate(deployment(entry_seconds=0.25), requests(due=3.0))
    assert [outcome.seconds for outcome in outcomes] == pytest.approx([2.25, 4.25, 5.25])


def test_a_refused_request_is_an_error() -> None:
    with pytest.raises(SimulationFailed, match="too long"):
        simulate(deployment(max_total_tokens=9), requests())


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


def test_prompts_that_begin_alike_share_exactly_that(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    system = texts.prompt(50, seed="system")
    first, second = (
        tokenizer.encode(texts.prompt(80, seed=seed, after=system)).ids for seed in "ab"
    )
    assert len(first) == len(second) == 80
    assert first[:50] == second[:50] == tokenizer.encode(system).ids
    assert first[50:] != second[50:]


def test_counting_agrees_with_the_tokenizer(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    prompts = [texts.prompt(length, seed=str(length)) for length in (5, 17)]
    assert texts.count(prompts) == sum(len(tokenizer.encode(p).ids) for p in prompts) == 22


def test_a_seed_names_a_prompt(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    assert texts.prompt(30, seed="a") == texts.prompt(30, seed="a")
    assert texts.prompt(30, seed="a")[:20] != texts.prompt(30, seed="b")[:20]


def test_no_prompt_is_shorter_than_its_beginning(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    with pytest.raises(ValueError, match="before the 3 begin"):
        texts.prompt(3, seed="a", after=texts.prompt(10, seed="b"))
