"""Short prompts overtake long ones, within bounds that a run in order of arrival gives."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace_router.prediction.cost import FIRST_PROMPT_TOKENS, CostModel
from millrace_router.prediction.step_load import StepLoad
from millrace_router.request.request import SchedulingParameters
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.queue import RequestQueue, WaitingQueue
from millrace_router.scheduler.step_plan import Budgets, StepPlan
from millrace_router.scheduler.tenants import TenantQueue

BUDGET = 16
BLOCK_SIZE = 4
LONG = 200
COST = CostModel.fixed(
    {
        "step": 0.010,
        "decode_row": 0.0,
        "decode_context_token": 0.0,
        "prefill_step": 0.0,
        "prefill_token": 0.001,
        "prefill_pair": 0.00001,
    }
)


@dataclass(slots=True)
class Prompts:
    """A planner whose requests yield one token each, and whose steps are answered before the next plan."""

    planner: Planner
    waiting: RequestQueue
    requests: dict[int, SchedulableRequest]
    steps: list[dict[int, int]]
    """Prompt tokens of each step by request."""
    done: dict[int, int]
    """The step that completes each request's prompt."""

    @classmethod
    def new(
        cls,
        *,
        shortest_first: bool = True,
        num_blocks: int = 10_000,
        rows: int = 200,
        tenants: bool = False,
        cost: CostModel | None = None,
        budget: int = BUDGET,
        target: float | None = None,
    ) -> Prompts:
        budgets = Budgets(
            max_batch_prefill_tokens=budget,
            max_batch_size=rows,
            spare_slots=2,
            shortest_first=shortest_first,
            target_inter_token_latency=target,
        )
        queue = TenantQueue(quantum=8) if tenants else WaitingQueue()
        planner = Planner(budgets, BlockManager(num_blocks, BLOCK_SIZE), cost)
        return cls(planner, queue, {}, [], {})

    def submit(
        self, num_tokens: int, *, priority: int = 0, tenant: str = "", max_new_tokens: int = 1
    ) -> int:
        number = len(self.requests)
        self.requests[number] = SchedulableRequest(
            request_id=number,
            num_prompt_tokens=num_tokens,
            max_new_tokens=max_new_tokens,
            queued_at=float(number),
            scheduling=SchedulingParameters(priority=priority, tenant=tenant),
        )
        self.waiting.append(self.requests[number])
        return number

    def step(self) -> StepPlan | None:
        """Plan and answer one step; a request leaves with its first token if it wants no more."""
        number = len(self.steps)
        plan = self.planner.plan(self.waiting, last_sent=number, last_answered=number)
        rows = self.planner.rows
        if plan is None:
            self.steps.append({})
            return None
        self.steps.append({rows[slot].entry.request_id: count for slot, count in plan.chunks})
        self.planner.computed(plan)
        for slot, _ in plan.chunks:
            row = rows[slot]
            if row.num_prompt_left == 0:
                self.done[row.entry.request_id] = number
                if row.max_tokens == 1:
                    self.planner.drop(row)
        return plan

    def run(self, arrivals: list[int] | None = None) -> dict[int, int]:
        """Run to the end, with the next of `arrivals` (0 for none) before each step."""
        left = list(arrivals or ())
        while left or len(self.done) < len(self.requests):
            if left and (num_tokens := left.pop(0)):
                self.submit(num_tokens)
            self.step()
            if not left and not self.waiting and not self.planner.rows:
                break
            assert len(self.steps) < 100_000
        return self.done

    @property
    def last(self) -> dict[int, int]:
        return self.steps[-1]


def arrived(arrivals: list[int]) -> list[int]:
    """The step before which each request arrives."""
    return [step for step, num_tokens in enumerate(arrivals) if num_tokens]


sizes = st.sampled_from([1, 3, 8, 20, 60, LONG]) | st.just(0)


@given(arrivals=st.lists(sizes, min_size=1, max_size=60))
def test_no_prompt_takes_more_than_twice_the_steps_that_it_takes_in_order_of_arrival(
    arrivals: list[int],
) -> None:
    came = arrived(arrivals)
    fair = Prompts.new(shortest_first=False).run(arrivals)
    steps = Prompts.new().run(arrivals)
    assert steps.keys() == fair.keys()
    for number, step in steps.items():
        assert step - came[number] + 1 <= 2 * (fair[number] - came[number] + 1) + 1


@given(arrivals=st.lists(sizes, min_size=1, max_size=60))
def test_every_step_is_as_full_as_in_order_of_arrival_and_computes_each_token_once(
    arrivals: list[int],
) -> None:
    for shortest_first in (True, False):
        prompts = Prompts.new(shortest_first=shortest_first)
        prompts.run(arrivals)
        totals = dict.fromkeys(prompts.requests, 0)
        for step in prompts.steps:
            assert sum(step.values()) <= BUDGET
            for number, count in step.items():
                totals[number] += count
        assert totals == {n: r.num_prompt_tokens for n, r in prompts.requests.items()}
        prompts.step()
        assert prompts.planner.blocks.num_owned == 0


def test_a_short_prompt_joins_the_next_step_of_a_long_one() -> None:
    prompts = Prompts.new()
    long = prompts.submit(LONG)
    prompts.step()
    short = prompts.submit(6)
    prompts.step()
    assert prompts.last == {short: 6, long: BUDGET - 6}
    prompts.step()
    assert prompts.last == {long: BUDGET}


def test_the_long_prompt_keeps_half_of_each_step_under_a_flood_of_short_ones() -> None:
    prompts = Prompts.new()
    long = prompts.submit(LONG)
    while long not in prompts.done:
        for _ in range(8):
            prompts.submit(4)
        prompts.step()
        assert prompts.last[long] >= BUDGET // 2 or long in prompts.done
    assert prompts.done[long] <= 2 * LONG // BUDGET


def test_a_prompt_of_like_length_waits_for_the_older_one() -> None:
    prompts = Prompts.new()
    older = prompts.submit(60)
    prompts.submit(50)
    prompts.step()
    assert prompts.last == {older: BUDGET}


def test_a_short_prompt_comes_before_all_waiting_long_ones() -> None:
    prompts = Prompts.new()
    for _ in range(5):
        prompts.submit(LONG)
    short = prompts.submit(5)
    prompts.step()
    assert prompts.last == {0: BUDGET - 5, short: 5}


def test_few_prompts_are_computed_in_part_at_once() -> None:
    prompts = Prompts.new()
    prompts.submit(10 * LONG)
    for _ in range(20):
        prompts.submit(LONG)
    most = 0
    while prompts.step() is not None:
        rows = prompts.planner.rows.values()
        most = max(most, sum(row.num_prompt_left > 0 for row in rows))
    assert most <= 5
    assert len(prompts.done) == 21


def test_in_order_of_arrival_no_prompt_overtakes_another() -> None:
    prompts = Prompts.new(shortest_first=False)
    prompts.submit(LONG)
    prompts.submit(5)
    prompts.step()
    assert prompts.last == {0: BUDGET}


def test_a_prompt_of_lower_priority_does_not_overtake_while_a_higher_one_waits() -> None:
    prompts = Prompts.new()
    long = prompts.submit(LONG)
    prompts.step()
    high = prompts.submit(LONG - 50, priority=1)
    prompts.submit(5)
    prompts.step()
    assert prompts.last == {long: BUDGET}
    short = prompts.submit(5, priority=1)
    prompts.step()
    assert prompts.last == {long: BUDGET - 5, short: 5}
    assert high not in prompts.done


def test_no_prompt_overtakes_one_that_lacks_room() -> None:
    """The second long prompt finds no blocks, so the short one behind it waits too."""
    prompts = Prompts.new(num_blocks=1 + LONG // BLOCK_SIZE + 20)
    prompts.submit(LONG)
    prompts.submit(LONG)
    prompts.submit(4)
    prompts.step()
    assert prompts.last == {0: BUDGET}


@pytest.mark.parametrize("rows", [2, 3])
def test_an_overtaking_prompt_leaves_a_slot_for_the_one_whose_turn_it_is(rows: int) -> None:
    prompts = Prompts.new(rows=rows)
    prompts.submit(LONG)
    prompts.submit(LONG)
    prompts.submit(4)
    prompts.step()
    assert len(prompts.last) == rows - 1


def test_an_overtaking_prompt_is_charged_to_its_tenant() -> None:
    prompts = Prompts.new(tenants=True)
    prompts.submit(LONG, tenant="a")
    prompts.submit(LONG, tenant="a")
    prompts.submit(5, tenant="b")
    prompts.step()
    assert prompts.last == {0: BUDGET - 5, 2: 5} or prompts.last == {2: 5, 0: BUDGET - 5}
    queue = prompts.waiting
    assert isinstance(queue, TenantQueue)
    assert queue.num_prompt_tokens == LONG
    assert len(queue) == 1


def test_steps_with_decodes_are_short_and_their_budget_counts_positions() -> None:
    """The decodes and the weights may take a tenth of a step; a token costs more at the end of a long prompt."""
    prompts = Prompts.new(cost=COST, budget=4096)
    prompts.submit(1, max_new_tokens=1000)
    prompts.step()
    long = prompts.submit(1500)
    plan = prompts.step()
    first = prompts.last[long]
    assert plan is not None
    seconds = COST.seconds(plan.load)
    assert seconds is not None
    assert 0.09 < seconds <= 0.1
    while long not in prompts.done:
        plan = prompts.step()
        assert plan is not None
        assert (COST.seconds(plan.load) or 0.0) <= 0.1
    assert prompts.steps[-2][long] < first / 2


def seconds_beside(num_streams: int, *, target: float | None = None, **costs: float) -> float:
    """Duration of a step that computes a part of a long prompt beside as many decodes."""
    cost = CostModel.fixed(COST.to_json() | costs)
    prompts = Prompts.new(cost=cost, budget=4096, target=target)
    for _ in range(num_streams):
        prompts.submit(1, max_new_tokens=1000)
    prompts.step()
    prompts.submit(3000)
    plan = prompts.step()
    assert plan is not None
    assert (len(plan.decodes), len(plan.chunks)) == (num_streams, 1)
    seconds = cost.seconds(plan.load)
    assert seconds is not None
    return seconds


@pytest.mark.parametrize(
    ("num_streams", "most"), [(1, 0.1), (2, 0.0475), (4, 0.0344), (8, 0.0311), (60, 0.03)]
)
def test_beside_many_streams_a_step_with_prompts_takes_three_of_those_without(
    num_streams: int, most: float
) -> None:
    assert 0.94 * most < seconds_beside(num_streams) <= most


def test_a_step_with_prompts_is_not_so_short_that_it_costs_throughput() -> None:
    assert seconds_beside(20, prefill_step=0.02) == pytest.approx(0.01 + 0.02 + 3 * 0.02, rel=0.03)
    # Nobody notices a pause of 20 ms.
    assert seconds_beside(20, step=0.001) == pytest.approx(0.02, rel=0.06)


@pytest.mark.parametrize("target", [0.02, 0.2, 0.4])
def test_a_target_moves_the_longest_step_in_both_directions(target: float) -> None:
    assert seconds_beside(20, target=target) == pytest.approx(target, rel=0.06)
    assert seconds_beside(20, target=100.0) == pytest.approx(0.5, rel=0.06)


@pytest.mark.parametrize("shortest_first", [True, False])
def test_steps_without_decodes_are_short_because_a_client_may_leave(
    *, shortest_first: bool
) -> None:
    prompts = Prompts.new(cost=COST, budget=4096, shortest_first=shortest_first)
    prompts.submit(9000)
    first, *others = [prompts.step() for _ in range(6)]
    assert first is not None
    assert first.load.prefill_tokens < 500
    for plan in (first, *others):
        assert plan is not None
        assert (COST.seconds(plan.load) or 0.0) <= 0.5


def test_a_machine_whose_weights_take_long_to_read_gets_longer_steps() -> None:
    """Nine tenths of a step go to its prompts."""
    slow = CostModel.fixed(COST.to_json() | {"step": 0.2})
    prompts = Prompts.new(cost=slow, budget=4096)
    prompts.submit(9000)
    plan = prompts.step()
    assert plan is not None
    assert slow.seconds(plan.load) == pytest.approx(2.0, rel=0.02)


def test_the_first_steps_are_short_until_their_costs_are_known() -> None:
    cost = CostModel()
    prompts = Prompts.new(cost=cost, budget=4096)
    long = prompts.submit(9000)
    prompts.step()
    assert prompts.last == {long: FIRST_PROMPT_TOKENS}
    for tokens in range(1, 20):
        cost.observe(StepLoad(prefill_tokens=tokens, num_chunks=1), tokens / 100_000)
    prompts.step()
    assert prompts.last == {long: 4096}


def test_a_short_prompt_joins_even_where_decodes_take_longer_than_the_target() -> None:
    prompts = Prompts.new(cost=COST, budget=4096, target=0.005)
    prompts.submit(1, max_new_tokens=1000)
    prompts.step()
    long = prompts.submit(1500)
    prompts.step()
    assert prompts.last == {long: 2 * BLOCK_SIZE}
    short = prompts.submit(BLOCK_SIZE - 1)
    prompts.step()
    assert prompts.last == {short: BLOCK_SIZE - 1, long: BLOCK_SIZE}


def test_half_of_the_seconds_are_for_short_prompts_far_into_a_long_one() -> None:
    prompts = Prompts.new(cost=COST, budget=4096)
    prompts.submit(1, max_new_tokens=1000)
    prompts.step()
    long = prompts.submit(3000)
    for _ in range(40):
        prompts.step()
    row = next(row for row in prompts.planner.rows.values() if row.entry.request_id == long)
    assert row.num_prompt_planned > 700
    shorts = [prompts.submit(10) for _ in range(20)]
    prompts.step()
    computed = sum(prompts.last.get(number, 0) for number in shorts)
    assert computed > prompts.last[long]
    assert COST.prompt_seconds(10, start=0) * computed / 10 <= 0.046


def test_a_short_prompt_has_a_short_step_and_the_long_one_the_next() -> None:
    prompts = Prompts.new(cost=COST, budget=4096)
    prompts.submit(1, max_new_tokens=1000)
    prompts.step()
    long = prompts.submit(1500)
    prompts.step()
    full = prompts.last[long]
    short = prompts.submit(5)
    prompts.step()
    assert prompts.last == {short: 5, long: BLOCK_SIZE}
    last = prompts.submit(5)
    prompts.step()
    assert prompts.last[last] == 5
    assert prompts.last[long] > full / 2


def test_prompts_that_overtake_leave_room_for_the_drafts_of_a_step() -> None:
    """The oldest prompt goes on by a block a step, or by what overtaking prompts leave of one."""
    budgets = Budgets(max_batch_prefill_tokens=8, max_batch_size=20, max_draft_tokens=3)
    planner = Planner(budgets, BlockManager(10_000, BLOCK_SIZE))
    prompts = Prompts(planner, WaitingQueue(), {}, [], {})
    prompts.submit(1, max_new_tokens=100)
    first = planner.plan(prompts.waiting, last_sent=1, last_answered=1)
    assert first is not None
    planner.computed(first, counts=[(first.chunks[0][0], 1)])
    prompts.submit(LONG)
    for _ in range(8):
        prompts.submit(2)
    for _ in range(8):
        plan = planner.plan(prompts.waiting, last_sent=1, last_answered=1)
        assert plan is not None
        assert plan.decode_tokens == [4]
        assert sum(plan.decode_tokens) + sum(count for _, count in plan.chunks) <= 8
