"""The scheduler under everything that can happen in any order: planner, allocator, prefix cache, queue and entries.

The shard derives each token from what its blocks really hold, so an output that equals the oracle's proves that every
block, slot and position was right.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from millrace_router.prediction.cost import COEFFICIENTS, CostModel
from millrace_router.scheduler.step_plan import Budgets
from millrace_testing.adapters.fake_adapters import adapters_for
from millrace_testing.schedules.driver import ScheduleDriver
from millrace_testing.schedules.requests import (
    MAX_PROMPT,
    VERSIONS,
    policies,
    valid_requests,
)
from millrace_testing.shards.hash_choices import Choices, RandomLengths
from millrace_testing.shards.hash_shard import HashShard

COST = CostModel.fixed(dict.fromkeys(COEFFICIENTS, 0.001) | {"step": 0.002})


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
        knows_costs=st.booleans(),
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
        knows_costs: bool,
    ) -> None:
        shard = HashShard(
            num_blocks=2 + (12 + spare_tokens) // block_size,
            block_size=block_size,
            max_batch_size=budgets.num_slots,
            eos_every=eos_every,
            max_draft_tokens=budgets.max_draft_tokens,
            choices=Choices(seed),
            adapters=adapters_for(VERSIONS, max_adapters=2, num_pages=2),
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

    @rule(loses_adapters=st.booleans())
    def fail_a_step(self, *, loses_adapters: bool) -> None:
        self.driver.shard.fail_next = "the device caught fire"
        self.driver.loses_adapters = loses_adapters

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
