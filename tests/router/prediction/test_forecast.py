"""Forecasts against a server played through event by event, with answer lengths that only it knows."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.prediction.cost import COEFFICIENTS, CostModel
from millrace_router.prediction.forecast import Forecaster, Prediction
from millrace_router.prediction.late_planning import LatePlanning
from millrace_router.prediction.step_load import StepLoad

COSTS = (0.0146, 0.0004, 1e-7, 0.001, 6e-5, 2.4e-7)
"""Of a 135M model on two cores, about."""
COST = dict(zip(COEFFICIENTS, COSTS, strict=True))
BLOCK = 16
LIMIT = 4096


def forecaster(
    cost: CostModel | None = None, *, is_late: bool = False, depth: int = 2, **limits: object
) -> Forecaster:
    sizes = {"max_batch_size": 32, "max_batch_prefill_tokens": 1024, "num_blocks": 1 << 16}
    cost = CostModel.fixed(COST) if cost is None else cost
    return Forecaster(
        cost,
        block_size=BLOCK,
        steps_in_flight=depth,
        late=LatePlanning(cost) if is_late else None,
        **(sizes | limits),  # type: ignore[arg-type]
    )


@dataclass(eq=False)
class Job:
    """A request and what became of it; at the same time the row it is while it runs."""

    arrived: float
    num_prompt: int
    length: int
    limit: int = LIMIT
    slot: int = -1
    num_computed: int = 0
    num_tokens_planned: int = 0
    num_generated: int = 0
    prediction: Prediction | None = None
    left_queue: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    @property
    def max_tokens(self) -> int:
        return self.limit

    @property
    def num_prompt_left(self) -> int:
        return self.num_prompt - self.num_computed

    @property
    def num_kv_tokens(self) -> int:
        return self.num_computed + max(0, self.num_tokens_planned - 1)


@dataclass
class Step:
    number: int
    seconds: float
    yields: list[Job]


@dataclass
class Server:
    """First come first served, prompts in chunks beside decodes; its own price list.

    Of two steps in flight it plans the second, where it is late, when nine tenths of the first are done.
    """

    arrivals: deque[Job]
    forecaster: Forecaster
    slots: int = 32
    budget: int = 1024
    num_blocks: int = 1 << 16
    slowness: Callable[[], float] = lambda: 1.0
    cost: CostModel | None = None
    is_late: bool = False
    depth: int = 2
    now: float = 0.0
    began: float = 0.0
    """When the oldest step in flight did."""
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    retired: list[tuple[int, int]] = field(default_factory=list)
    flights: deque[Step] = field(default_factory=deque)
    number: int = 0
    most_running: int = 0

    def run(self) -> None:
        self.free = list(range(self.slots))
        while self.arrivals or self.waiting or self.running:
            if self.flights or self.plan():
                if self.is_late:
                    self.arrive(until=self.began + 0.9 * self.flights[0].seconds)
                if self.depth == 2:
                    self.plan()
                self.answer(self.flights.popleft())
            else:
                self.began = self.arrivals[0].arrived
                self.arrive(until=self.began)

    def arrive(self, until: float) -> None:
        while self.arrivals and self.arrivals[0].arrived <= until:
            job = self.arrivals.popleft()
            job.prediction = self.forecaster.predict(
                self.running,
                ahead=(len(self.waiting), sum(other.num_prompt for other in self.waiting)),
                num_prompt_tokens=job.num_prompt,
                max_new_tokens=job.limit,
                now_in_step=job.arrived - self.began,
            )
            self.waiting.append(job)
        self.now = max(self.now, until)

    def plan(self) -> bool:
        yields = [job for job in self.running if 0 < job.num_tokens_planned < job.limit]
        decodes, context = len(yields), 0
        for job in yields:
            job.num_tokens_planned += 1
            context += job.num_kv_tokens
        budget, pairs, tokens = self.budget - decodes, 0, 0
        chunked = [job for job in self.running if job.num_prompt_left]
        while budget > 0 and (chunked or self.fits()):
            job = chunked.pop(0) if chunked else self.admit()
            size, start = min(budget, job.num_prompt_left), job.num_computed
            job.num_computed += size
            budget, tokens = budget - size, tokens + size
            pairs += size * (start + 1 + start + size) // 2
            if not job.num_prompt_left:
                job.num_tokens_planned = 1
                yields.append(job)
        if not (decodes or tokens):
            return False
        features = (1, decodes, context, bool(tokens), tokens, pairs)
        seconds = sum(a * b for a, b in zip(features, COSTS, strict=True)) * self.slowness()
        if self.cost is not None:
            self.cost.observe(StepLoad(tokens, pairs, bool(tokens), decodes, context), seconds)
        self.number += 1
        self.flights.append(Step(self.number, seconds, yields))
        return True

    def fits(self) -> bool:
        used = sum(-(-max(job.num_kv_tokens, job.num_prompt) // BLOCK) for job in self.running)
        return bool(
            self.waiting
            and self.free
            and used + -(-self.waiting[0].num_prompt // BLOCK) + len(self.running)
            <= self.num_blocks
        )

    def admit(self) -> Job:
        job = self.waiting.popleft()
        job.slot, job.left_queue = self.free.pop(), self.now
        self.running.append(job)
        self.most_running = max(self.most_running, len(self.running))
        return job

    def answer(self, step: Step) -> None:
        end = self.began + step.seconds
        self.arrive(until=end)
        self.began = end
        for job in step.yields:
            if job.finished:
                continue
            job.num_generated += 1
            job.first_token = job.first_token or end
            if job.num_generated == job.length:
                job.finished = end
                self.running.remove(job)
                self.retired.append((self.number, job.slot))
                self.forecaster.finished(
                    num_prompt=job.num_prompt, num_generated=job.length, max_new_tokens=job.limit
                )
        self.free += [slot for number, slot in self.retired if number <= step.number]
        self.retired = [item for item in self.retired if item[0] > step.number]


def play(jobs: list[Job], *, warm: int, **server: object) -> tuple[list[Job], Server]:
    """Those of `jobs` that arrived after the first `warm`, served."""
    limits = {"max_batch_size": 32, "num_blocks": server.get("num_blocks", 1 << 16)}
    known = {name: server[name] for name in ("cost", "is_late", "depth") if name in server}
    played = Server(deque(jobs), forecaster(**known, **limits), **server)  # type: ignore[arg-type]
    played.run()
    return jobs[warm:], played


def poisson(
    seed: int, count: int, rate: float, length: Callable[[random.Random], int]
) -> list[Job]:
    rng, now, jobs = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        jobs.append(Job(now, max(1, int(rng.lognormvariate(5, 0.6))), length(rng)))
    return jobs


def heavy_tail(rng: random.Random) -> int:
    return min(2000, 1 + int(rng.lognormvariate(4, 0.8)))


def exponential(rng: random.Random) -> int:
    return 1 + int(rng.expovariate(1 / 80))


def errors(jobs: list[Job], *, least: float = 0.5) -> list[float]:
    """Signed relative errors of the queue time, of those that waited."""
    found = []
    for job in jobs:
        waited = job.left_queue - job.arrived
        if waited >= least and job.prediction is not None:
            found.append(job.prediction.queue_seconds / waited - 1)
    return found


SCENARIOS: dict[str, tuple[list[Job], dict[str, object], float, float]] = {
    "equal lengths": (poisson(1, 1000, 12, lambda _: 80), {}, 0.08, 0.05),
    "memoryless lengths": (poisson(1, 1000, 12, exponential), {}, 0.2, 0.1),
    "heavy tail": (poisson(2, 1000, 13, heavy_tail), {}, 0.2, 0.1),
    "bursts": (
        [
            Job(60.0 * burst, 150, heavy_tail(random.Random(1000 * burst + number)))
            for burst in range(6)
            for number in range(200)
        ],
        {},
        0.2,
        0.15,
    ),
    "few blocks": (poisson(2, 1000, 6, heavy_tail), {"num_blocks": 150}, 0.35, 0.2),
}
"""Jobs, server, bounds of the median relative error of the queue time and of its bias."""


PIPELINES = pytest.mark.parametrize(
    "pipeline",
    [{"is_late": False}, {"is_late": True}, {"depth": 1}],
    ids=["early", "late", "one step in flight"],
)


@PIPELINES
@pytest.mark.parametrize("name", SCENARIOS)
def test_queue_time_under_load_is_foreseen(name: str, pipeline: dict[str, object]) -> None:
    arrivals, server, most, bias = SCENARIOS[name]
    jobs, played = play(
        [Job(j.arrived, j.num_prompt, j.length) for j in arrivals],
        warm=200,
        **server,
        **pipeline,
    )
    found = errors(jobs)
    assert len(found) > 300
    assert median(map(abs, found)) < most
    assert abs(median(found)) < bias
    if "num_blocks" in server:
        assert played.most_running < played.slots


@PIPELINES
def test_first_token_is_foreseen_with_and_without_a_queue(pipeline: dict[str, object]) -> None:
    for rate, most in ((4, 0.1), (12, 0.2)):
        jobs, _ = play(poisson(3, 800, rate, exponential), warm=200, **pipeline)
        found = [
            abs(job.prediction.first_token_seconds / (job.first_token - job.arrived) - 1)
            for job in jobs
            if job.prediction is not None
        ]
        assert len(found) == 600
        assert median(found) < most


@pytest.mark.parametrize("rate", [4, 10, 12])
def test_the_end_is_foreseen_where_lengths_can_be(rate: int) -> None:
    jobs, _ = play(poisson(4, 800, rate, lambda _: 80), warm=200)
    found = [
        job.prediction.finish_seconds / (job.finished - job.arrived) - 1
        for job in jobs
        if job.prediction is not None
    ]
    assert len(found) == 600
    assert median(map(abs, found)) < 0.1
    assert abs(median(found)) < 0.03


def test_limits_that_are_always_met_are_known_lengths() -> None:
    arrivals = poisson(5, 1000, 13, exponential)
    for job in arrivals:
        job.limit = job.length
    jobs, _ = play(arrivals, warm=200)
    found = errors(jobs)
    assert len(found) > 200
    assert median(map(abs, found)) < 0.12


def test_it_works_with_a_cost_model_that_learns_from_noisy_steps() -> None:
    rng = random.Random(6)
    jobs, _ = play(
        poisson(6, 1000, 12, heavy_tail),
        warm=200,
        cost=CostModel(),
        slowness=lambda: rng.uniform(0.9, 1.1) * (5 if rng.random() < 0.02 else 1),
    )
    found = errors(jobs)
    assert len(found) > 300
    assert median(map(abs, found)) < 0.25


ROWS = st.lists(
    st.builds(
        Job,
        arrived=st.just(0.0),
        length=st.just(0),
        num_prompt=st.integers(1, 2000),
        limit=st.integers(1, 4000),
        num_computed=st.integers(0, 2000),
        num_tokens_planned=st.integers(0, 4000),
    ),
    max_size=32,
)


def settled(rows: list[Job]) -> list[Job]:
    """Drawn numbers made to fit each other, as a planner's do."""
    for slot, row in enumerate(rows):
        row.slot = slot
        row.num_computed = min(row.num_computed, row.num_prompt)
        planned = min(row.num_tokens_planned, row.limit)
        row.num_tokens_planned = planned if not row.num_prompt_left else 0
    return rows


@settings(deadline=None, max_examples=150)
@given(
    rows=ROWS,
    lengths=st.lists(st.integers(1, 4000), max_size=30),
    num_blocks=st.integers(2, 4000),
    num_ahead=st.integers(0, 600),
    prompt=st.integers(1, 2000),
    reserve_all=st.booleans(),
)
def test_more_ahead_never_means_sooner(
    rows: list[Job],
    lengths: list[int],
    num_blocks: int,
    num_ahead: int,
    prompt: int,
    reserve_all: bool,
) -> None:
    model = forecaster(num_blocks=num_blocks, reserve_all=reserve_all)
    for length in lengths:
        model.finished(num_prompt=100, num_generated=length, max_new_tokens=LIMIT)
    predictions = [
        model.predict(
            settled(rows),
            ahead=(count, count * prompt),
            num_prompt_tokens=prompt,
            max_new_tokens=200,
        )
        for count in (num_ahead, num_ahead + 1)
    ]
    one, two = predictions
    assert one is not None
    assert two is not None
    assert 0 <= one.queue_seconds <= one.first_token_seconds <= one.finish_seconds
    assert one.queue_seconds <= two.queue_seconds + 1e-9


def test_an_idle_server_serves_at_once() -> None:
    found = forecaster().predict([], ahead=(0, 0), num_prompt_tokens=500, max_new_tokens=101)
    assert found is not None
    assert found.queue_seconds == 0.0
    # A chunk is priced with the decode that it may run beside.
    prefill = 0.0146 + 0.001 + 0.0004 + 6e-5 * 500 + 2.4e-7 * 500 * 501 / 2
    assert found.first_token_seconds == pytest.approx(prefill, rel=0.01)
    decode = 0.0146 + 0.0004 + 1e-7 * 550
    assert found.finish_seconds == pytest.approx(prefill + 100 * decode, rel=0.01)


def running(count: int, *, left: int, planned: int = 10, prompt: int = 100) -> list[Job]:
    return [
        Job(
            0.0,
            prompt,
            0,
            limit=planned + left,
            slot=slot,
            num_computed=prompt,
            num_tokens_planned=planned,
        )
        for slot in range(count)
    ]


def test_with_a_free_slot_it_waits_for_the_step_in_flight_only() -> None:
    step = 0.0146 + 32 * 0.0004
    for elapsed in (0.0, 0.01, 9.9):
        found = forecaster().predict(
            running(31, left=500),
            ahead=(0, 0),
            num_prompt_tokens=10,
            max_new_tokens=10,
            now_in_step=elapsed,
        )
        assert found is not None
        assert found.queue_seconds == pytest.approx(max(0.0, step - elapsed), rel=0.05)


def test_a_full_batch_is_waited_for() -> None:
    rows = running(31, left=500) + running(1, left=40)
    rows[-1].slot = 31
    found = forecaster().predict(rows, ahead=(0, 0), num_prompt_tokens=10, max_new_tokens=10)
    assert found is not None
    assert found.queue_seconds == pytest.approx(43 * (0.0146 + 32 * 0.0004), rel=0.05)


def test_of_many_answers_of_unknown_length_one_ends_soon() -> None:
    model, rng = forecaster(), random.Random(1)
    for _ in range(500):
        model.finished(num_prompt=100, num_generated=exponential(rng), max_new_tokens=LIMIT)
    found = model.predict(
        running(32, left=2000), ahead=(0, 0), num_prompt_tokens=10, max_new_tokens=10
    )
    assert found is not None
    # The least of 32 exponential lengths is a 32nd of one; each has 80 steps left on average.
    steps = found.queue_seconds / (0.0146 + 32 * 0.0004)
    assert 3 <= steps < 3 + 80 / 8


def test_blocks_are_waited_for_as_slots_are() -> None:
    rows = running(4, left=50, prompt=1000)
    enough = forecaster(num_blocks=400).predict(
        rows, ahead=(0, 0), num_prompt_tokens=1000, max_new_tokens=10
    )
    short = forecaster(num_blocks=300).predict(
        rows, ahead=(0, 0), num_prompt_tokens=1000, max_new_tokens=10
    )
    assert enough is not None
    assert short is not None
    assert enough.queue_seconds < 0.05
    assert short.queue_seconds > 0.5


def test_reserving_everything_leaves_fewer_places() -> None:
    rows = running(4, left=1000)
    growing = forecaster(num_blocks=300).predict(
        rows, ahead=(0, 0), num_prompt_tokens=100, max_new_tokens=1000
    )
    reserving = forecaster(num_blocks=300, reserve_all=True).predict(
        rows, ahead=(0, 0), num_prompt_tokens=100, max_new_tokens=1000
    )
    assert growing is not None
    assert reserving is not None
    assert growing.queue_seconds < 0.05
    assert reserving.queue_seconds > 5


def test_a_cached_prompt_is_sooner_and_a_latency_target_makes_prompts_later() -> None:
    def first(model: Forecaster, num_cached: int = 0) -> float:
        found = model.predict(
            running(8, left=500),
            ahead=(0, 0),
            num_prompt_tokens=1000,
            max_new_tokens=10,
            num_cached=num_cached,
        )
        assert found is not None
        return found.first_token_seconds

    assert first(forecaster(), num_cached=992) < 0.3 * first(forecaster())
    assert first(forecaster(target_inter_token_latency=0.03)) > 1.5 * first(forecaster())


def test_cached_prompts_of_the_past_make_those_ahead_cheaper() -> None:
    def queue(num_cached: int) -> float:
        model = forecaster()
        for _ in range(300):
            model.finished(
                num_prompt=1000, num_generated=10, max_new_tokens=10, num_cached=num_cached
            )
        found = model.predict([], ahead=(20, 20_000), num_prompt_tokens=1000, max_new_tokens=10)
        assert found is not None
        return found.queue_seconds

    assert queue(900) < 0.2 * queue(0)


def test_it_learns_how_long_answers_get() -> None:
    def finish(model: Forecaster) -> float:
        found = model.predict([], ahead=(0, 0), num_prompt_tokens=100, max_new_tokens=LIMIT)
        assert found is not None
        return found.finish_seconds

    model = forecaster()
    before = finish(model)
    rng = random.Random(1)
    for _ in range(500):
        model.finished(num_prompt=100, num_generated=exponential(rng), max_new_tokens=LIMIT)
    assert before == pytest.approx(LIMIT * 0.015, rel=0.1)
    assert finish(model) == pytest.approx(80 * 0.015, rel=0.3)


@pytest.mark.parametrize("unknown", ["cost", "chunks"])
def test_nothing_is_predicted_without_known_costs_or_without_chunks(unknown: str) -> None:
    model = forecaster(CostModel()) if unknown == "cost" else forecaster(prefill_chunking=False)
    assert model.predict([], ahead=(0, 0), num_prompt_tokens=1, max_new_tokens=1) is None
    assert model.drain_seconds([], waiting=(3, 30)) is None


def test_the_queue_drains_entry_by_entry() -> None:
    model = forecaster()
    rng = random.Random(1)
    for _ in range(300):
        model.finished(num_prompt=100, num_generated=exponential(rng), max_new_tokens=LIMIT)
    rows = running(32, left=2000)
    found = [model.drain_seconds(rows, waiting=(100, 10_000), num_leaving=n) for n in (1, 10, 100)]
    one, ten, all_of_them = found
    assert one is not None
    assert ten is not None
    assert all_of_them is not None
    assert 0 < one < ten < all_of_them
    # Places come every mean length / slots steps.
    assert all_of_them == pytest.approx(100 * 82 / 32 * (0.0146 + 32 * 0.0004), rel=0.4)
    assert model.drain_seconds(rows, waiting=(5, 500), num_leaving=6) == 0.0


def test_rows_in_spare_slots_are_rows_like_others() -> None:
    rows = running(32, left=50)
    usual = forecaster().predict(rows, ahead=(8, 800), num_prompt_tokens=100, max_new_tokens=LIMIT)
    for row in rows[:8]:
        row.slot += 32
    assert usual is not None
    assert usual == forecaster().predict(
        rows, ahead=(8, 800), num_prompt_tokens=100, max_new_tokens=LIMIT
    )


def test_rows_that_yield_several_tokens_at_once_end_sooner() -> None:
    """Twice as many a step: half the steps until a place is free, and until the end."""
    rows = [Job(0.0, 100, 200, limit=200, slot=slot, num_computed=100) for slot in range(32)]
    for row in rows:
        row.num_tokens_planned = 1
    found = []
    for tokens_per_row in (1, 2):
        oracle = forecaster()
        for _ in range(500):
            oracle.yielded(32 * tokens_per_row, 32)
        prediction = oracle.predict(
            rows, ahead=(0, 0), num_prompt_tokens=10, max_new_tokens=200, num_cached=0
        )
        assert prediction is not None
        found.append(prediction)
    one, two = found
    assert one.queue_seconds == pytest.approx(2 * two.queue_seconds, rel=0.05)
    last = [each.finish_seconds - each.first_token_seconds for each in found]
    assert last[0] == pytest.approx(2 * last[1], rel=0.01)
