"""The load generator against a server whose every byte is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from aiohttp import web

from millrace.load.levels import Level, closed, poisson
from millrace.load.load import run_level
from millrace_testing.router.sse import FakeServer, event, served, served_application, whole_stream

LEVEL = closed(3, 5, 4, rounds=2)


async def test_every_token_of_every_request_is_stamped_in_order() -> None:
    fake = FakeServer(whole_stream)
    async with served(fake) as url:
        outcome = await run_level(url, LEVEL)
    assert outcome.failures == []
    assert [len(timeline.arrivals) for timeline in outcome.timelines] == [4] * 6
    for timeline in outcome.timelines:
        assert timeline.due <= timeline.arrivals[0]
        assert timeline.arrivals == sorted(timeline.arrivals)


async def test_a_closed_loop_keeps_its_concurrency_and_sends_each_prompt_once() -> None:
    fake = FakeServer(whole_stream, hold=3)
    async with served(fake) as url:
        await run_level(url, LEVEL)
    assert fake.most_at_once == 3
    assert sorted(body["inputs"] for body in fake.bodies) == sorted(LEVEL.prompts())


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    level = poisson(2000.0, 3, 2, num_requests=12)
    fake = FakeServer(whole_stream, hold=12)
    async with served(fake) as url:
        outcome = await run_level(url, level)
    assert fake.most_at_once == 12
    assert len(outcome.timelines) == 12


async def test_it_asks_for_exactly_the_length_and_for_no_early_end() -> None:
    fake = FakeServer(whole_stream)
    async with served(fake) as url:
        await run_level(url, closed(1, 5, 7, rounds=1))
    assert fake.bodies[0]["parameters"] == {
        "max_new_tokens": 7,
        "ignore_eos": True,
        "details": True,
        "do_sample": False,
    }


async def test_events_may_come_in_any_pieces() -> None:
    def byte_by_byte(body: dict[str, object]) -> list[bytes]:
        stream = b":\n\n" + b"".join(whole_stream(body))
        return [stream[i : i + 1] for i in range(len(stream))]

    async with served(FakeServer(byte_by_byte)) as url:
        outcome = await run_level(url, closed(1, 5, 4, rounds=1))
    assert outcome.failures == []
    assert len(outcome.timelines[0].arrivals) == 4


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([event(1, last=False), event(3, last=True)], "token 3 came as 2"),
        ([event(1, last=False), event(1, last=False)], "token 1 came as 2"),
        ([event(1, last=False), event(2, last=False)], "without an end"),
        ([event(1, last=True)], "asked for 2 tokens, got 1"),
        ([event(1, last=False), event(2, last=True, generated=5)], "details say 5"),
        ([b'data: {"error":"no","error_type":"generation"}\n\n'], "generation: no"),
        ([event(1, last=False)[:-4]], "inside an event"),
        ([], "without an end"),
    ],
)
async def test_a_stream_that_is_not_whole_is_a_failure(pieces: list[bytes], reason: str) -> None:
    async with served(FakeServer(lambda _: pieces)) as url:
        outcome = await run_level(url, closed(1, 5, 2, rounds=1))
    assert outcome.timelines == []
    assert len(outcome.failures) == 1
    assert reason in outcome.failures[0]


async def test_one_failure_leaves_the_other_requests_alone() -> None:
    first = next(LEVEL.prompts())
    fake = FakeServer(lambda body: [] if body["inputs"] == first else whole_stream(body))
    async with served(fake) as url:
        outcome = await run_level(url, LEVEL)
    assert (len(outcome.timelines), len(outcome.failures)) == (5, 1)


async def test_a_refusal_is_counted_with_its_status() -> None:
    application = web.Application()
    async with served_application(application) as url:
        outcome = await run_level(url, closed(1, 5, 2, rounds=1))
    assert outcome.timelines == []
    assert "status 404" in outcome.failures[0]


def test_the_same_level_is_the_same_load() -> None:
    level = poisson(4.0, 6, 2, num_requests=50)
    assert list(level.prompts()) == list(replace(level).prompts())
    assert list(level.arrival_seconds()) == list(level.arrival_seconds())
    assert list(level.prompts()) != list(replace(level, seed=1).prompts())


def test_poisson_arrivals_have_the_set_rate_and_spread() -> None:
    level = poisson(4.0, 6, 2, num_requests=20_000)
    times = list(level.arrival_seconds())
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.25, rel=0.03)
    assert deviation == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize("loop", [{}, {"concurrency": 1, "rate": 1.0}])
def test_a_level_is_closed_or_open(loop: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="concurrency or rate"):
        Level(name="x", num_requests=1, prompt_tokens=1, new_tokens=1, **loop)  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [b"no JSON", b"[]", b"{}", b'{"index": {}}'])
async def test_events_of_something_else_are_failures(data: bytes) -> None:
    async with served(FakeServer(lambda _: [b"data: " + data + b"\n\n"])) as url:
        outcome = await run_level(url, LEVEL)
    assert (len(outcome.failures), outcome.timelines) == (6, [])
