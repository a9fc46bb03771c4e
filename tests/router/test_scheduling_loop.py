"""The real batcher on its event loop, under clients that come, leave and steps that fail at any moment."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millrace_fakes_router import DirectShards, collect, ids_of, new_batcher, request, running
from millrace_hash_choices import Choices
from millrace_hash_shard import HashShard
from millrace_hash_tokens import expected_tokens
from millrace_held_shards import HeldShards
from millrace_router.batcher import Batcher
from millrace_router.budgets import Budgets
from millrace_router.cost import CostModel
from millrace_router.entry import Entry
from millrace_router.entry_queue import EntryQueue
from millrace_router.errors import Quarantined
from millrace_router.late_planning import LatePlanning
from millrace_router.step_load import StepLoad
from millrace_router.tenants import TenantQueue
from millrace_router.waiting import WaitingQueue
from millrace_schedule_client import Client
from millrace_schedule_driver import check_blocks
from millrace_schedule_requests import MAX_PROMPT, policies, valid_requests

NUM_TURNS = 6
"""Turns of the event loop after which the batcher waits for an answer or a request, whatever was done to it."""


class AlwaysOpen(LatePlanning):
    """Leaves every step open until the test lets time pass, or the one before is answered."""

    def __init__(self) -> None:
        super().__init__(CostModel())
        self.learned: list[float] = []

    def learn(self, spare_seconds: float) -> None:
        self.learned.append(spare_seconds)

    def open_seconds(self, load: StepLoad) -> float:
        return math.inf


class LoopMachine(RuleBasedStateMachine):
    """Between two rules the batcher has done all it can."""

    @initialize(
        budgets=policies,
        block_size=st.sampled_from([1, 4]),
        spare_tokens=st.integers(0, 24),
        prefix_caching=st.booleans(),
        depth=st.integers(1, 3),
        is_late=st.booleans(),
        eos_every=st.sampled_from([0, 0, 30]),
        seed=st.integers(0, 2**16),
    )
    def begin(
        self,
        *,
        budgets: Budgets,
        block_size: int,
        spare_tokens: int,
        prefix_caching: bool,
        depth: int,
        is_late: bool,
        eos_every: int,
        seed: int,
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self.clients: list[Client] = []
        self.shard = HashShard(
            num_blocks=2 + (12 + spare_tokens) // block_size,
            block_size=block_size,
            max_batch_size=budgets.num_slots,
            eos_every=eos_every,
            speculate=budgets.speculate,
            choices=Choices(seed),
        )
        self.shards = HeldShards(self.shard, on_error=self.count_failures)
        waiting: EntryQueue = (
            TenantQueue[Entry](quantum=8) if budgets.share_slots else WaitingQueue[Entry]()
        )
        self.batcher = new_batcher(
            self.shards,
            self.shard,
            budgets=budgets,
            prefix_caching=prefix_caching,
            waiting=waiting,
            depth=depth,
            late=AlwaysOpen() if is_late else None,
        )
        self.waiting = waiting
        self.task = self.loop.create_task(self.batcher.run())
        self.capacity = (self.shard.num_blocks - 1) * block_size
        self.longest = min(MAX_PROMPT, self.capacity)
        if not budgets.prefill_chunking:
            self.longest = min(self.longest, budgets.max_batch_prefill_tokens)

    def count_failures(self) -> None:
        """Those whose tokens a failed step was to compute never hear of the first one."""
        streams = {row.entry.stream for row in self.batcher._planner.running}
        for client in self.clients:
            client.num_failures += client.stream in streams

    def let_it_work(self) -> None:
        async def turn() -> None:
            for _ in range(NUM_TURNS):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turn())
        assert not self.task.done()

    @rule(data=st.data(), copies=st.integers(1, 4))
    def submit(self, data: st.DataObject, copies: int) -> None:
        request = data.draw(
            valid_requests(
                longest=self.longest, capacity=self.capacity, eos_every=self.shard.eos_every
            )
        )
        for _ in range(copies):
            try:
                stream = self.batcher.submit(request)
            except Quarantined:
                ids = [c.request.input_ids for c in self.clients if c.num_failures > 1]
                assert request.input_ids in ids, "refused without a reason"
                return
            self.clients.append(Client(request, stream, self.shard.eos_every))
        self.let_it_work()

    @precondition(lambda self: self.shards.num_held)
    @rule(count=st.integers(1, 12))
    def answer(self, count: int) -> None:
        for _ in range(count):
            if self.shards.num_held:
                self.shards.release()
                self.let_it_work()

    @precondition(lambda self: self.shards.num_held)
    @rule()
    def let_time_pass(self) -> None:
        self.shards.let_time_pass()
        self.let_it_work()

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.live())).leave()
        self.let_it_work()

    @rule()
    def fail_a_step(self) -> None:
        self.shard.fail_next = "the device caught fire"

    @rule()
    def run_to_idle(self) -> None:
        """Everything ends without another request to wake the batcher, within a bound of steps."""
        self.shard.fail_next = None
        work = sum(len(c.request.input_ids) + c.request.max_new_tokens + 6 for c in self.live())
        for _ in range(30 + 6 * work):
            self.let_it_work()
            if not self.shards.num_held:
                break
            self.shards.release()
        assert self.live() == [], "the batcher sleeps, and somebody waits"
        planner = self.batcher._planner
        blocks = planner.blocks
        assert len(self.waiting) == planner.num_paused == len(planner.running) == 0
        assert not self.shard.running
        assert blocks.num_free + blocks.num_cached == blocks.num_blocks
        self.everything_is_right()

    def live(self) -> list[Client]:
        return [client for client in self.clients if not client.has_ended]

    @invariant()
    def everything_is_right(self) -> None:
        assert self.shard.violation is None
        for client in self.clients:
            client.check()
        check_blocks(self.batcher._planner.blocks)

    def teardown(self) -> None:
        """Whoever is there when the server stops hears of it, once."""
        if not hasattr(self, "loop"):
            return
        for client in self.clients:
            client.may_fail = True
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            self.loop.run_until_complete(self.task)
        self.loop.close()
        assert self.live() == []
        for client in self.clients:
            client.check()


TestSchedulingLoop = LoopMachine.TestCase
TestSchedulingLoop.settings = settings(deadline=None, max_examples=80, stateful_step_count=30)


async def test_a_preempted_request_pauses_and_its_client_hears_of_nothing_else() -> None:
    shard = HashShard(num_blocks=8, block_size=4)
    batcher = new_batcher(DirectShards(shard), shard, max_batch_prefill_tokens=64)
    async with running(batcher):
        streams = [batcher.submit(request([i] * 4, 20)) for i in range(3)]
        outputs = [ids_of(events) for events in await asyncio.gather(*map(collect, streams))]
    assert outputs == [expected_tokens([i] * 4, 20) for i in range(3)]
    replays = [
        s for step in shard.steps for s in step.prefill.change.admitted if s.generated_tokens
    ]
    assert replays, "the blocks of two and a half requests served three without a preemption"


async def test_the_stream_knows_how_much_of_its_prompt_was_cached() -> None:
    shard = HashShard()
    batcher = new_batcher(DirectShards(shard), shard, max_batch_prefill_tokens=64)
    async with running(batcher):
        streams = []
        for _ in range(2):
            streams.append(batcher.submit(request([5] * 11, 3)))
            await collect(streams[-1])
    assert [stream.cached_tokens for stream in streams] == [0, 8]


async def test_a_failed_step_empties_the_cache() -> None:
    shard = HashShard()
    batcher = new_batcher(DirectShards(shard), shard, max_batch_prefill_tokens=64)
    async with running(batcher):
        await collect(batcher.submit(request([5] * 11, 3)))
        shard.fail_next = "the device caught fire"
        await collect(batcher.submit(request([6], 3)))
        again = batcher.submit(request([5] * 11, 3))
        assert ids_of(await collect(again)) == expected_tokens([5] * 11, 3)
    assert again.cached_tokens == 0


def late_batcher(late: LatePlanning | None = None) -> tuple[Batcher, HeldShards, HashShard]:
    shard = HashShard()
    shards = HeldShards(shard, on_error=lambda: None)
    return new_batcher(shards, shard, late=late or AlwaysOpen()), shards, shard


async def turns() -> None:
    for _ in range(NUM_TURNS):
        await asyncio.sleep(0)


def admissions(shard: HashShard) -> list[int]:
    """How many sequences each step admits; the first message only opens the epoch."""
    return [len(step.prefill.change.admitted) for step in shard.steps[1:]]


async def test_who_comes_while_the_next_step_is_open_is_in_it() -> None:
    batcher, shards, shard = late_batcher()
    async with running(batcher):
        await turns()
        batcher.submit(request([1], 9))
        await turns()
        assert admissions(shard) == [1]
        batcher.submit(request([2], 9))
        shards.let_time_pass()
        await turns()
        assert admissions(shard) == [1, 1]
        batcher.submit(request([3], 9))
        await turns()
        assert admissions(shard) == [1, 1], "two steps are in flight"
        shards.release()
        await turns()
        assert admissions(shard) == [1, 1], "the third one stays open"
        shards.let_time_pass()
        await turns()
        assert admissions(shard) == [1, 1, 1]


async def test_shards_that_are_done_early_get_the_next_step_at_once() -> None:
    batcher, shards, shard = late_batcher()
    async with running(batcher):
        await turns()
        stream = batcher.submit(request([1], 9))
        await turns()
        for number in range(1, 9):
            assert len(admissions(shard)) == number
            shards.release()
            await turns()
        shards.release()
        assert ids_of(await collect(stream)) == expected_tokens([1], 9)


async def test_a_failure_while_the_next_step_is_open_is_noticed_at_once() -> None:
    batcher, shards, shard = late_batcher()
    async with running(batcher):
        await turns()
        shard.fail_next = "the device caught fire"
        stream = batcher.submit(request([1], 2))
        await turns()
        for _ in range(3):
            shards.release()
            await turns()
        assert ids_of(await collect(stream)) == expected_tokens([1], 2)


async def test_a_step_that_only_drops_rows_says_nothing_of_how_late_is_too_late() -> None:
    late = AlwaysOpen()
    batcher, shards, shard = late_batcher(late)
    async with running(batcher):
        await turns()
        stream = batcher.submit(request([1], 1))
        await turns()
        shards.let_time_pass()
        await turns()
        shards.release()
        await turns()
        assert ids_of(await collect(stream)) == expected_tokens([1], 1)
        assert admissions(shard) == [1, 0]
        shards.release()
        await turns()
        assert not shards.num_held
    assert late.learned == []
