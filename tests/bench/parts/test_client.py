"""The load generator against servers whose every byte is known."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from bench.parts.client import (
    Answer,
    Client,
    Request,
    RequestsFailed,
    closed_loop,
    open_loop,
    succeeded,
)

from millrace_testing.router.sse import FakeServer, event, served, served_application, whole_stream

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
