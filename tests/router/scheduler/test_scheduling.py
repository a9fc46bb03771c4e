"""The scheduler under everything that can happen in any order: planner, allocator, prefix cache, queue and entries.

The shard derives each token from what its blocks really hold, so an output that equals the oracle's proves that every
block, slot and position was right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from millrace_router.errors import Quarantined
from millrace_router.prediction.cost import COEFFICIENTS, CostModel
from millrace_router.request.entry import entry_of
from millrace_router.scheduler.queue import RequestQueue, WaitingQueue
from millrace_router.scheduler.step_plan import Budgets
from millrace_router.scheduler.tenants import TenantQueue
from millrace_router.scheduler.window_blocks import WindowGroup
from millrace_testing.adapters.fake_adapters import adapters_for
from millrace_testing.router.fake_router import (
    DirectShards,
    collect,
    ids_of,
    new_batcher,
    request,
    running,
)
from millrace_testing.schedules.client import Client
from millrace_testing.schedules.driver import ScheduleDriver, check_blocks
from millrace_testing.schedules.requests import (
    MAX_PROMPT,
    VERSIONS,
    policies,
    valid_requests,
)
from millrace_testing.shards.hash_choices import Choices, RandomLengths
from millrace_testing.shards.hash_shard import HashShard
from millrace_testing.shards.hash_tokens import expected_tokens
from millrace_testing.shards.held_shards import NUM_TURNS, AlwaysOpen, HeldShards

COST = CostModel.fixed(dict.fromkeys(COEFFICIENTS, 0.001) | {"step": 0.002})


WINDOWS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6)), max_size=2)
"""Windows, and blocks beyond what one sequence needs to go on."""


def groups_of(windows: list[tuple[int, int]], block_size: int) -> tuple[WindowGroup, ...]:
    """Window groups, whose kernels read two masked positions."""
    return tuple(
        WindowGroup(
            num_blocks=3 + -(-(window + 2) // block_size) + spare,
            window=window,
            reach=window + 2,
        )
        for window, spare in windows
    )


class SchedulingMachine(RuleBasedStateMachine):
    """Every rule may come at any moment, with steps in flight or none."""

    driver: ScheduleDriver

    @initialize(
        budgets=policies,
        block_size=st.sampled_from([1, 2, 4]),
        spare_tokens=st.integers(0, 24),
        prefix_caching=st.booleans(),
        depth=st.integers(1, 3),
        eos_every=st.sampled_from([0, 0, 30]),
        seed=st.integers(0, 2**16),
        windows=WINDOWS,
        knows_costs=st.booleans(),
        state_pages=st.sampled_from([0, 2, 4, 20]),
    )
    def begin(
        self,
        budgets: Budgets,
        block_size: int,
        spare_tokens: int,
        prefix_caching: bool,
        depth: int,
        eos_every: int,
        seed: int,
        *,
        windows: list[tuple[int, int]],
        knows_costs: bool,
        state_pages: int,
    ) -> None:
        shard = HashShard(
            num_blocks=2 + (12 + spare_tokens) // block_size,
            block_size=block_size,
            max_batch_size=budgets.num_slots,
            eos_every=eos_every,
            max_draft_tokens=budgets.max_draft_tokens,
            choices=Choices(seed),
            adapters=adapters_for(VERSIONS, max_adapters=2, num_pages=2),
            windows=groups_of(windows, block_size),
            # States cannot go back behind a rejected draft token.
            state_pages=0 if budgets.max_draft_tokens else state_pages,
        )
        self.driver = ScheduleDriver(
            budgets,
            shard,
            prefix_caching=prefix_caching,
            depth=depth,
            drafts=RandomLengths(seed, budgets.max_draft_tokens)
            if budgets.max_draft_tokens
            else None,
            cost=COST if knows_costs else None,
        )
        self.capacity = (shard.num_blocks - 1) * block_size
        self.longest = min(MAX_PROMPT, self.capacity)

    @rule(data=st.data(), copies=st.integers(1, 4))
    def submit(self, data: st.DataObject, copies: int) -> None:
        """One request, or several samples of it."""
        request = data.draw(
            valid_requests(
                longest=self.longest,
                capacity=self.capacity,
                eos_every=self.driver.shard.eos_every,
                adapters=True,
            )
        )
        for _ in range(copies):
            self.driver.submit(request)

    @precondition(lambda self: len(self.driver.flights) < self.driver.depth)
    @rule()
    def send(self) -> None:
        self.driver.send()

    @precondition(lambda self: self.driver.flights)
    @rule()
    def receive(self) -> None:
        self.driver.receive()

    @rule(turns=st.integers(1, 12))
    def go_on(self, turns: int) -> None:
        for _ in range(turns):
            self.driver.turn()

    @precondition(lambda self: self.driver.unended())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A client goes: queued, in the middle of its prompt, running, preempted, with steps in flight or not."""
        number = data.draw(st.sampled_from(self.driver.unended()))
        self.driver.clients[number].leave()

    @rule(answers=st.booleans())
    def let_adapters_go_on(self, *, answers: bool) -> None:
        self.driver.let_adapters_go_on(answers=answers)

    @rule(loses_adapters=st.booleans(), keeps_kv=st.booleans())
    def fail_a_step(self, *, loses_adapters: bool, keeps_kv: bool) -> None:
        self.driver.shard.fail_next = "the device caught fire"
        self.driver.loses_adapters, self.driver.keeps_kv = loses_adapters, keeps_kv

    @rule(keeps_kv=st.booleans(), size=st.integers(1, 6), prefill_tokens=st.integers(4, 40))
    def cut(self, *, keeps_kv: bool, size: int, prefill_tokens: int) -> None:
        """An epoch ends with steps in flight, and the next one has smaller limits, or full ones again."""
        budgets = self.driver.budgets
        self.driver.limits = replace(
            budgets,
            max_batch_size=min(size, budgets.max_batch_size),
            max_batch_prefill_tokens=min(prefill_tokens, budgets.max_batch_prefill_tokens),
        )
        self.driver.keeps_kv = keeps_kv
        self.driver.cut()

    @precondition(lambda self: self.driver.unended())
    @rule(data=st.data())
    def corrupt(self, data: st.DataObject) -> None:
        """From now on one request computes values that are not finite; no other request is affected."""
        number = data.draw(st.sampled_from(self.driver.unended()))
        self.driver.shard.corrupt.add(number)
        self.driver.clients[number].may_fail = True

    @rule()
    def run_to_idle(self) -> None:
        """Everything ends within a bounded number of steps: no deadlock, no livelock, no starvation."""
        driver = self.driver
        driver.shard.fail_next = None
        live = [driver.clients[number].request for number in driver.unended()]
        work = sum(len(request.input_ids) + request.max_new_tokens + 6 for request in live)
        driver.run(most=200 + 20 * work)
        driver.check_idle()

    @invariant()
    def everything_is_right(self) -> None:
        self.driver.check()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.run_to_idle()


TestScheduling = SchedulingMachine.TestCase
TestScheduling.settings = settings(deadline=None, max_examples=100, stateful_step_count=40)


T = TypeVar("T")


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
        windows=WINDOWS,
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
        windows: list[tuple[int, int]],
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self.clients: list[Client] = []
        self.shard = HashShard(
            num_blocks=2 + (12 + spare_tokens) // block_size,
            block_size=block_size,
            max_batch_size=budgets.num_slots,
            eos_every=eos_every,
            max_draft_tokens=budgets.max_draft_tokens,
            choices=Choices(seed),
            adapters=adapters_for(VERSIONS, max_adapters=2, num_pages=2),
            windows=groups_of(windows, block_size),
        )
        self.shards = HeldShards(self.shard, on_error=self.count_failures)
        waiting: RequestQueue = TenantQueue(quantum=8) if budgets.share_slots else WaitingQueue()
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

    def count_failures(self) -> None:
        """Clients do not learn of the first failed step that was to compute their tokens."""
        streams = {entry_of(row.entry).stream for row in self.batcher._planner.running}
        for client in self.clients:
            client.num_failures += client.stream in streams

    def in_loop(self, call: Callable[[], T]) -> T:
        """Call a function on the event loop; adapters set timers there."""

        async def called() -> T:
            return call()

        return self.loop.run_until_complete(called())

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
                longest=self.longest,
                capacity=self.capacity,
                eos_every=self.shard.eos_every,
                adapters=True,
            )
        )
        for _ in range(copies):
            try:
                stream = self.in_loop(lambda: self.batcher.submit(request))
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
        client = data.draw(st.sampled_from(self.live()))
        self.in_loop(client.leave)
        self.let_it_work()

    @rule(loses_adapters=st.booleans())
    def fail_a_step(self, *, loses_adapters: bool) -> None:
        self.shard.fail_next = "the device caught fire"
        self.shard.loses_adapters = loses_adapters

    @rule()
    def run_to_idle(self) -> None:
        """Everything ends without another request to wake the batcher, within a bound of steps."""
        self.shard.fail_next = None
        work = sum(len(c.request.input_ids) + c.request.max_new_tokens + 6 for c in self.live())
        for _ in range(60 + 12 * work):
            # A load takes some turns, and an unload before it.
            for _ in range(4):
                self.let_it_work()
            if not self.shards.num_held:
                break
            self.shards.release()
        assert self.live() == [], "the batcher sleeps while a client waits"
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
        """Each client that is connected when the server stops gets one error."""
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
TestSchedulingLoop.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


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
