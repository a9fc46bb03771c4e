"""Each experiment makes the same requests each time, draws its chart, and says what follows from its table."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from bench.harness.quiet import Quiet
from bench.harness.repeats import Repeated, Sample
from bench.parts.client import Answer, Request
from bench.parts.fixture import Fixture
from bench.parts.outcome import Outcome
from bench.parts.part import Figures, Table
from bench.parts.texts import Texts
from bench.policies import variance
from bench.policies.outcomes import outcomes_of
from bench.policies.plug import send_behind_plug
from bench.policies.static_planner import NaivePlanner
from bench.policies.static_server import PLANNERS
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.request.request import ValidRequest
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.prefix_cache import PrefixCache
from millrace_router.scheduler.step_plan import Budgets
from millrace_testing.router.sse import event, served_application
from millrace_testing.schedules.driver import ScheduleDriver
from millrace_testing.shards.hash_shard import HashShard


def fixture(texts: Texts, *, most_positions: int = 8192) -> Fixture:
    return Fixture(
        model=Path("model"),
        texts=texts,
        most_positions=most_positions,
        quick=False,
        quiet=Quiet(),
        out=Path("out"),
    )


def row(figures: Figures) -> dict[str, Repeated]:
    return {title: Repeated((Sample(value, 0.0),)) for title, value in figures.items()}


def test_each_cap_cuts_the_same_lengths_and_variance_grows_with_it(texts: Texts) -> None:
    drawn = {cap: variance.lengths(fixture(texts), cap) for cap in variance.CAPS}
    assert drawn == {cap: variance.lengths(fixture(texts), cap) for cap in variance.CAPS}
    assert drawn[32] == [min(length, 32) for length in drawn[1536]]
    spreads = [statistics.pvariance(lengths) for lengths in drawn.values()]
    assert spreads == sorted(spreads)
    assert max(variance.lengths(fixture(texts, most_positions=512), 1536)) <= 512 * 3 // 4 - 32


def outcomes(*seconds: float) -> list[Outcome]:
    request = Request(prompt="", prompt_tokens=1, output_tokens=10)
    return [Outcome(request, each) for each in seconds]


def request(output_tokens: int, due: float = 0.0) -> Request:
    return Request(prompt=" ab", prompt_tokens=1, output_tokens=output_tokens, due=due)


def table(**rows: Figures) -> Table:
    return {
        name: {title: Repeated((Sample(value, 0.0),)) for title, value in figures.items()}
        for name, figures in rows.items()
    }


OUTCOMES = [
    Outcome(request(10, due=2.0), 1.0),
    Outcome(request(30, due=4.0), 6.0),
    Outcome(request(20, due=5.0), 0.5),
]


def test_answers_count_from_their_due_time_or_from_one_moment_for_all() -> None:
    answers = [
        Answer(request(1), due=10.0, ended=13.0),
        Answer(request(1), due=11.0, ended=15.0),
    ]
    assert [outcome.seconds for outcome in outcomes_of(answers)] == [3.0, 4.0]
    assert [outcome.seconds for outcome in outcomes_of(answers, since=12.0)] == [1.0, 3.0]


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
            # The server waits for requests in progress, and clients that gave up have left some.
            async with self._changed:
                self._has_ended, self.num_waiting = True, len(ASKED)
                self._changed.notify_all()

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


LENGTHS = [2, 7, 4, 3, 9, 1]
"""New tokens of the requests; the prompts have four tokens."""


class PolicyDriver(ScheduleDriver):
    """A driver with the planner of a policy."""

    def __init__(
        self, planner: type[Planner], budgets: Budgets, shard: HashShard, **options: Any
    ) -> None:
        self.kind = planner
        super().__init__(budgets, shard, **options)

    def _new_planner(self, blocks: BlockManager | None = None) -> Planner:
        cache = PrefixCache() if self.prefix_caching else None
        blocks = blocks or BlockManager(self.shard.num_blocks, self.shard.block_size, cache)
        return self.kind(self.budgets, blocks, self.cost, self.drafts)

    def counts(self, slot: int) -> bool:
        return not (isinstance(self.planner, NaivePlanner) and slot in self.planner.padding)


def driver_of(
    policy: str,
    *,
    rows: int = 3,
    num_blocks: int = 60,
    budget: int = 40,
    prefix_caching: bool = False,
) -> ScheduleDriver:
    budgets = Budgets(
        max_batch_prefill_tokens=budget,
        max_batch_size=rows,
        spare_slots=rows,
    )
    shard = HashShard(num_blocks=num_blocks, block_size=4, max_batch_size=budgets.num_slots)
    driver = PolicyDriver(
        PLANNERS.get(policy, Planner), budgets, shard, prefix_caching=prefix_caching
    )
    for number, length in enumerate(LENGTHS):
        driver.submit(ValidRequest(input_ids=(number,) * 4, max_new_tokens=length))
    return driver


def batches(driver: ScheduleDriver) -> list[set[int]]:
    """Requests of each step with a forward pass, in turn; every output is checked, and nothing is left over."""
    found = []
    slots: dict[int, int] = {}
    driver.run()
    for plan in driver.plans:
        slots |= {row.slot: row.entry.request_id for row in plan.admitted}
        if plan.has_forward:
            found.append({slots[slot] for slot in [*dict(plan.chunks), *plan.decodes]})
    driver.check_idle()
    return found


def test_a_static_batch_admits_no_request_before_all_have_ended() -> None:
    found = batches(driver_of("static"))
    assert found[0] == {0, 1, 2}
    first = [step for step in found if step & {0, 1, 2}]
    assert all(step <= {0, 1, 2} for step in first)
    assert found[: len(first)] == first, "the second batch began before the first had ended"
    assert first[-1] == {1}, "ended rows are still decoded"
    assert found[len(first)] == {3, 4, 5}


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_naive_static_batch_decodes_ended_rows_until_the_longest_ends(
    *, prefix_caching: bool
) -> None:
    driver = driver_of("static-naive", prefix_caching=prefix_caching)
    found = batches(driver)
    first = [step for step in found if step & {0, 1, 2}]
    assert LENGTHS[1] <= len(first) <= LENGTHS[1] + driver.depth
    for number in (0, 2):
        # The planner learns of an end with the answer.
        assert sum(number not in step for step in first) <= driver.depth
        assert number in first[-1]
    assert found[len(first)] == {3, 4, 5}


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(["static", "static-naive"]), st.integers(8, 40), st.booleans())
def test_every_answer_is_right_when_any_other_client_leaves(
    data: st.DataObject, policy: str, num_blocks: int, prefix_caching: bool
) -> None:
    driver = driver_of(policy, num_blocks=num_blocks, prefix_caching=prefix_caching)
    for _ in range(data.draw(st.integers(0, 30))):
        driver.turn()
        if data.draw(st.integers(0, 9)) == 0 and driver.unended():
            driver.clients[data.draw(st.sampled_from(driver.unended()))].leave()
        if data.draw(st.integers(0, 9)) == 0:
            prompt = (data.draw(st.integers(0, 3)),) * data.draw(st.integers(1, 9))
            driver.submit(
                ValidRequest(input_ids=prompt, max_new_tokens=data.draw(st.integers(1, 9)))
            )
    batches(driver)
