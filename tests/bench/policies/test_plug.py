"""The first static batch is full: all requests wait while another one runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from bench.parts.client import Request, RequestsFailed
from bench.parts.fixture import Fixture
from bench.policies.plug import plug_of, send_behind_plug

from millrace_testing.router.sse import event, served_application

ASKED = [Request(prompt=" ab", prompt_tokens=1, output_tokens=3, streams=False)] * 5


class FakeServer:
    """Answers waiting requests once the plug has ended, which it ends after `num_waited_for` of them wait."""

    def __init__(self, num_waited_for: int) -> None:
        self.num_waiting = 0
        self._num_waited_for = num_waited_for
        self._changed = asyncio.Condition()
        self._has_ended = False

    @asynccontextmanager
    async def url(self) -> AsyncIterator[str]:
        application = web.Application()
        application.router.add_post("/generate_stream", self._plug)
        application.router.add_post("/generate", self._generate)
        application.router.add_get("/metrics", self._metrics)
        async with served_application(application) as url:
            yield url

    async def _plug(self, request: web.Request) -> web.StreamResponse:
        asked = (await request.json())["parameters"]["max_new_tokens"]
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(event(1, last=False))
        async with self._changed:
            await self._changed.wait_for(lambda: self.num_waiting >= self._num_waited_for)
            for index in range(2, asked + 1):
                await response.write(event(index, last=index == asked))
            self._has_ended = True
            self._changed.notify_all()
        return response

    async def _generate(self, _: web.Request) -> web.Response:
        async with self._changed:
            self.num_waiting += 1
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._has_ended and self.num_waiting >= len(ASKED))
        return web.json_response({"details": {"generated_tokens": 3}})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f"tgi_queue_size {self.num_waiting}\n")


async def test_requests_count_from_the_end_of_the_plug(fixture: Fixture) -> None:
    async with FakeServer(len(ASKED)).url() as url:
        outcomes = await send_behind_plug(fixture, url, ASKED)
    assert [outcome.request for outcome in outcomes] == ASKED
    assert all(outcome.seconds < 30 for outcome in outcomes)


async def test_a_plug_that_ends_too_early_is_an_error(fixture: Fixture) -> None:
    async with FakeServer(0).url() as url:
        with pytest.raises(RequestsFailed, match="the plug ended"):
            await send_behind_plug(fixture, url, [*ASKED, *ASKED])


def test_the_plug_outlasts_the_sending_of_many_requests(fixture: Fixture) -> None:
    assert plug_of(fixture, 5).output_tokens == 256
    assert plug_of(fixture, 1000).output_tokens == 1000
