"""The cost of planning a step, over the number of waiting requests."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from bench.parts.fixture import Fixture
from bench.parts.part import Case, Figures, Part, Table
from millrace.load.measurement import quantile
from millrace_router.request.block_hashes import BlockHashes
from millrace_router.request.request import SchedulingParameters
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.prefix_cache import PrefixCache
from millrace_router.scheduler.queue import RequestQueue, WaitingQueue
from millrace_router.scheduler.step_plan import Budgets, StepPlan
from millrace_router.scheduler.tenants import TenantQueue

NUM_RUNNING, PROMPT_TOKENS, BLOCK_SIZE = 256, 200, 16
LEAST_ANSWER, MOST_ANSWER = 100, 400
NUM_TENANTS = 1000
WARM_STEPS = 450
"""Steps until answers of every length have ended."""
TOTAL = "both, median µs"
GOAL_MICROSECONDS = 1000.0
MOST_GROWTH = 1.5

CASES = (
    *(Case(f"{n} waiting", amount=n) for n in (0, 100, 1_000, 10_000, 100_000)),
    *(Case(f"{n} waiting, {NUM_TENANTS} tenants", ("tenant",), n) for n in (10_000, 100_000)),
)


@dataclass(slots=True, eq=False, kw_only=True)
class Waiter(SchedulableRequest):
    """A request without a stream: lengths, and tokens for its block keys."""

    prompt: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    keys: BlockHashes = field(default_factory=lambda: BlockHashes(BLOCK_SIZE))

    def block_keys(self, count: int) -> Sequence[bytes]:
        """Keys of the first `count` blocks."""
        return self.keys.first(count, self.prompt, self.generated)


class Steps:
    """Plans steps, two in flight as in the router, and answers them at once; the queue keeps its length."""

    def __init__(self, queue: RequestQueue, *, num_waiting: int) -> None:
        num_blocks = NUM_RUNNING * ((PROMPT_TOKENS + MOST_ANSWER) // BLOCK_SIZE + 2)
        budgets = Budgets(max_batch_prefill_tokens=4096, max_batch_size=NUM_RUNNING)
        self.planner = Planner(budgets, BlockManager(num_blocks, BLOCK_SIZE, PrefixCache()))
        self._queue = queue
        self._random = random.Random(0)
        self._num_sent = 0
        self._next_id = 0
        self._in_flight: list[StepPlan] = []
        for _ in range(num_waiting + NUM_RUNNING):
            self._append()

    def step(self) -> tuple[float, float]:
        """Seconds for planning a step, and for recording the previous one."""
        clock = time.perf_counter
        began = clock()
        plan = self.planner.plan(
            self._queue, last_sent=self._num_sent, last_answered=max(0, self._num_sent - 1)
        )
        planned = clock() - began
        assert plan is not None
        self._num_sent += 1
        self._in_flight.append(plan)
        for _ in plan.admitted:
            self._append()
        if len(self._in_flight) < 2:
            return planned, 0.0
        answered = self._in_flight.pop(0)
        began = clock()
        self.planner.computed(answered)
        noted = clock() - began
        self._deliver(answered)
        return planned, noted

    def _append(self) -> None:
        number = self._next_id
        self._next_id += 1
        waiter = Waiter(
            request_id=number,
            num_prompt_tokens=PROMPT_TOKENS,
            max_new_tokens=self._random.randint(LEAST_ANSWER, MOST_ANSWER),
            scheduling=SchedulingParameters(tenant=str(number % NUM_TENANTS)),
            queued_at=float(number),
            prompt=[number % 50_000] * PROMPT_TOKENS,
        )
        self._queue.append(waiter)

    def _deliver(self, plan: StepPlan) -> None:
        """Give each row of a step its token, and drop it after its last."""
        slots = [*plan.decodes, *(slot for slot, _ in plan.chunks)]
        for slot in slots:
            row = self.planner.row(slot)
            if row is None or row.num_computed < row.num_inputs:
                continue
            assert isinstance(row.entry, Waiter)
            row.entry.generated.append(7)
            row.entry.num_generated += 1
            if row.entry.num_generated >= row.entry.max_new_tokens:
                self.planner.drop(row)
                self._queue.served(row.entry, row.entry.num_generated)


def queue_of(case: Case) -> RequestQueue:
    """One queue, or one for each of many tenants."""
    return TenantQueue(quantum=4096) if case.flags else WaitingQueue()


def arrival_seconds(queue: RequestQueue, count: int, new: Callable[[int], Waiter]) -> float:
    """Median time for counting a request against the queue, adding it and removing it."""
    taken = []
    for number in range(count):
        waiter = new(number)
        began = time.perf_counter()
        queue.ahead(waiter.scheduling, waiter.queued_at)
        queue.append(waiter)
        queue.discard(waiter)
        taken.append(time.perf_counter() - began)
    return median(taken)


def run(fixture: Fixture, case: Case) -> Figures:
    queue = queue_of(case)
    steps = Steps(queue, num_waiting=int(case.amount))
    for _ in range(WARM_STEPS):
        steps.step()
    taken = [steps.step() for _ in range(fixture.sized(2000, 300))]
    both = sorted(1e6 * sum(pair) for pair in taken)

    def new(number: int) -> Waiter:
        tenant = str(number % NUM_TENANTS)
        return Waiter(
            request_id=10**9 + number,
            num_prompt_tokens=PROMPT_TOKENS,
            max_new_tokens=100,
            scheduling=SchedulingParameters(tenant=tenant),
            queued_at=1e9,
            prompt=[1] * PROMPT_TOKENS,
        )

    return {
        "running": len(steps.planner.rows),
        "plan, median µs": 1e6 * median(planned for planned, _ in taken),
        "computed, median µs": 1e6 * median(noted for _, noted in taken),
        TOTAL: quantile(both, 0.5),
        "both, p99 µs": quantile(both, 0.99),
        "an arrival, median µs": 1e6 * arrival_seconds(queue, fixture.sized(2000, 300), new),
    }


def conclude(table: Table) -> Sequence[str]:
    """The goal, and the growth of the curve."""
    at = table["10000 waiting"][TOTAL].median
    growth = table["100000 waiting"][TOTAL].median / table["100 waiting"][TOTAL].median
    met = "met" if at < GOAL_MICROSECONDS else "missed"
    flat = "flat" if growth <= MOST_GROWTH else "NOT flat"
    return [
        f"{NUM_RUNNING} running and 10 000 waiting: {at:.0f} µs a step (goal {GOAL_MICROSECONDS:.0f}, {met}).",
        f"From 100 to 100 000 waiting the cost of a step grows {growth:.2f} times: {flat}.",
    ]


PART = Part(
    name="planner",
    title="Cost of a planning step",
    method=(
        f"`Planner.plan` and `Planner.computed` alone, without a server: {NUM_RUNNING} rows of"
        f" {PROMPT_TOKENS} prompt tokens and answers of {LEAST_ANSWER} to {MOST_ANSWER}, so that about one"
        " ends and one is admitted in each step; the prefix cache is on, and two steps are in flight."
        " An arrival is counted against the queue, joins it and leaves it."
    ),
    cases=CASES,
    run=run,
    conclude=conclude,
)
