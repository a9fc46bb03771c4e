"""The requests of the part `large` of structured output, and its figures of streams and answers, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from aiohttp import web
from bench.harness.repeats import Repeated, Sample
from bench.parts.client import Answer, Request, RequestsFailed
from bench.parts.fixture import Fixture
from bench.parts.part import Table
from bench.structured_output import batch_composition, large, large_grammars
from pydantic import BaseModel

from millrace_router.api.openai.request import ChatCompletionRequest
from millrace_router.api.tgi.request import GenerateRequest
from millrace_router.request.grammar import MAX_SOURCE_BYTES
from millrace_router.server.bodies import check_structure
from millrace_testing.router.sse import FakeServer, served_application, whole_stream

PLAIN = [Request(prompt="x", prompt_tokens=1, output_tokens=20)] * 3
CHATS = "/v1/chat/completions"
MODELS: dict[str, type[BaseModel]] = {"/generate": GenerateRequest, CHATS: ChatCompletionRequest}
FULL = {large.WIDE.name, large.DEEP.name, large.TOOLS.name}


@pytest.mark.parametrize("name", sorted(large.larges()))
def test_the_router_takes_what_is_sent_and_no_number_is_another_s_grammar(name: str) -> None:
    sent = large.larges()[name]
    bodies = [sent.numbered(number) for number in ("n1_0", "n1_1")]
    for body in bodies:
        check_structure(body)
        MODELS[sent.path].model_validate_json(body)
    grammar = sent.read()
    assert grammar is not None
    source = grammar.source.encode()
    assert large_grammars.MARK.encode() in source
    assert bodies[0] != bodies[1]
    assert all(large_grammars.MARK.encode() not in body for body in bodies)
    if name in FULL:
        assert 120_000 < len(source) < MAX_SOURCE_BYTES


def _num_levels(schema: Any) -> int:
    """The number of levels of schemas in the properties of schemas."""
    return 1 + max(map(_num_levels, schema.get("properties", {}).values()), default=0)


def test_deep_schemas_are_as_deep_as_is_allowed() -> None:
    assert _num_levels(large_grammars.deep(1)) == large_grammars.NUM_LEVELS == 64
    assert _num_levels(large_grammars.wide(1)) == 3


class _Server:
    """Streams, and answers grammars with the statuses in turn; no stream begins before `hold` of them came."""

    def __init__(self, *statuses: int, hold: int = 0) -> None:
        self.bodies: list[bytes] = []
        self.littles: list[bytes] = []
        self._statuses = statuses
        self._hold = hold
        self._enough = asyncio.Event()
        if not hold:
            self._enough.set()

    async def stream(self, request: web.Request) -> web.StreamResponse:
        await self._enough.wait()
        return await FakeServer(whole_stream).generate_stream(request)

    async def grammar(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        number = len(self.bodies)
        if number >= self._hold:
            self._enough.set()
        # Later ones come while streams end, as many as there is time for.
        status = self._statuses[min(number, len(self._statuses)) - 1]
        return web.Response(status=status, text="why")

    async def little(self, request: web.Request) -> web.Response:
        self.littles.append(await request.read())
        return web.Response()

    async def run(self, act: Callable[[str], Any]) -> Any:
        application = web.Application(client_max_size=2_000_000)
        application.router.add_post("/generate_stream", self.stream)
        application.router.add_post("/generate", self.grammar)
        application.router.add_post(CHATS, self.grammar)
        application.router.add_post("/", self.little)
        async with served_application(application) as url:
            return await act(url)


SMALL = large_grammars.request_of_schema(large_grammars.wide(1))


async def test_grammars_are_sent_while_streams_run_and_counted_by_status() -> None:
    server = _Server(200, 422, 422, 429, hold=4)
    found = await server.run(lambda url: large.beside(url, PLAIN, SMALL, 7))
    assert (found["200"], found["422"]) == (1, 2)
    assert found["429"] == len(server.bodies) - 3 >= 1
    assert found[large.UNTIL] > 0
    assert batch_composition.MEAN in found
    # Each is another grammar, of this round.
    assert len(set(server.bodies)) == len(server.bodies)
    assert all(b'"n7_' in body for body in server.bodies)


async def test_nothing_is_sent_beside_nothing() -> None:
    server = _Server()
    found = await server.run(lambda url: large.beside(url, PLAIN, None, 7))
    assert server.bodies == []
    assert set(found) == {
        *(batch_composition.MEAN, batch_composition.MEDIAN, batch_composition.WORST, large.LONGEST),
        *(large.LITTLE, large.LONGEST_LITTLE),
    }
    assert len(set(server.littles)) == len(server.littles) >= 1


async def test_an_answer_that_is_out_of_order_is_a_failure() -> None:
    with pytest.raises(RequestsFailed, match="500: why"):
        await _Server(200, 500, 200, hold=3).run(lambda url: large.beside(url, PLAIN, SMALL, 7))


async def test_no_answer_at_all_is_a_failure() -> None:
    with pytest.raises(RequestsFailed):
        await large.beside("http://127.0.0.1:1", PLAIN, SMALL, 7)


async def test_a_connection_that_breaks_is_out_of_order() -> None:
    async def breaks(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    application = web.Application()
    application.router.add_post("/generate_stream", FakeServer(whole_stream).generate_stream)
    application.router.add_post("/generate", breaks)
    async with served_application(application) as url:
        with pytest.raises(RequestsFailed, match="answers to grammars are out of order, such as 0"):
            await large.beside(url, PLAIN, SMALL, 7)


def test_time_between_tokens_counts_streams_in_their_steady_state() -> None:
    """Each token takes 10 ms, but for one before the stream has settled and one of 110 ms after it."""
    seconds = [0.01] * 113
    seconds[3], seconds[60] = 5.0, 0.11
    arrivals = [sum(seconds[: number + 1]) for number in range(len(seconds))]
    request = Request(prompt="x", prompt_tokens=1, output_tokens=113)
    found = large.gap_figures([Answer(request, 0.0, arrivals=arrivals)] * 2)
    # 100 gaps of each stream.
    assert batch_composition.SETTLED_TOKENS == 12
    assert found[batch_composition.MEAN] == pytest.approx(11)
    assert found[batch_composition.MEDIAN] == pytest.approx(10)
    assert found[large.LONGEST] == pytest.approx(110)
    assert 10 < found[batch_composition.WORST] < 110


def test_every_round_takes_all_cases_in_another_order(fixture: Fixture) -> None:
    async def turn(number: int) -> dict[str, Any]:
        async def act(url: str) -> Any:
            return await asyncio.to_thread(large.rounds, fixture, url, number)

        (found,) = await _Server(422).run(act)
        return dict(found)

    first, second = (asyncio.run(turn(number)) for number in (1, 2))
    names = [case.name for case in large.CASES]
    assert sorted(first) == sorted(second) == sorted(names)
    assert list(first) == names[1:] + names[:1]
    assert list(second) == names[2:] + names[:2]
    # Where there is a grammar, it is read.
    assert {name for name, figures in first.items() if large.READ in figures} == set(large.larges())


def _table(ratios: dict[str, tuple[float, float]]) -> Table:
    """Two turns of each case, the second on a machine twice as slow; ratios to the first case."""
    titles = (batch_composition.MEAN, batch_composition.WORST, large.LONGEST, large.LITTLE)
    return {
        case.name: {
            title: Repeated(
                tuple(
                    Sample(10.0 * slow * ratio, 0.0)
                    for slow, ratio in zip((1, 2), ratios.get(case.name, (1.0, 1.0)), strict=True)
                )
            )
            for title in titles
        }
        for case in large.CASES
    }


def test_conclusions_are_medians_of_ratios_and_sums_of_statuses() -> None:
    table = _table({large.WIDE.name: (1.0, 3.0)})
    counts = Repeated((Sample(2.0, 0.0), Sample(5.0, 0.0)))
    counted = {**table, large.WIDE.name: {**table[large.WIDE.name], "200": counts, "422": counts}}
    wide, *others, answered = large.LARGE.conclude(counted)
    assert "wide schemas" in wide
    assert "2.00 in the mean" in wide
    assert "1.50 to 2.50, 2 turns). A new small schema takes 2.00 of the time." in wide
    assert len(others) == 4
    assert all("1.00 in the mean, 1.00 at p99" in line for line in others)
    assert answered.startswith("All 14 ")
    assert answered.endswith("7 with 200, 7 with 422, 0 with 429.")


def test_tools_are_offered_as_a_chat_offers_them() -> None:
    sent = large_grammars.request_of_tools(large_grammars.tools())
    body = orjson.loads(sent.numbered("n1_0"))
    assert sent.path == CHATS
    assert body["tool_choice"] == "required"
    names = [tool["function"]["name"] for tool in body["tools"]]
    assert names == [f"n1_0_{number}" for number in range(large_grammars.NUM_TOOLS)]
