"""Forecasts for batches whose results can be calculated."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.prediction.cost import COEFFICIENTS, CostModel
from millrace_router.prediction.forecast import Forecaster
from millrace_router.prediction.late_planning import LatePlanning

COSTS = (0.0146, 0.0004, 1e-7, 0.001, 6e-5, 2.4e-7)
"""Approximate costs of a 135M model on two cores."""
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
    """A row of the running batch."""

    num_prompt: int
    limit: int = LIMIT
    slot: int = -1
    num_computed: int = 0
    num_tokens_planned: int = 0

    @property
    def max_tokens(self) -> int:
        return self.limit

    @property
    def num_prompt_left(self) -> int:
        return self.num_prompt - self.num_computed

    @property
    def num_kv_tokens(self) -> int:
        return self.num_computed + max(0, self.num_tokens_planned - 1)


def exponential(rng: random.Random) -> int:
    return 1 + int(rng.expovariate(1 / 80))


ROWS = st.lists(
    st.builds(
        Job,
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
    # A chunk is priced with the decode in the same step.
    prefill = 0.0146 + 0.001 + 0.0004 + 6e-5 * 500 + 2.4e-7 * 500 * 501 / 2
    assert found.first_token_seconds == pytest.approx(prefill, rel=0.01)
    decode = 0.0146 + 0.0004 + 1e-7 * 550
    assert found.finish_seconds == pytest.approx(prefill + 100 * decode, rel=0.01)


def running(count: int, *, left: int, planned: int = 10, prompt: int = 100) -> list[Job]:
    return [
        Job(
            prompt,
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
    whole_prompts = forecaster(shortest_first=False)
    target = forecaster(shortest_first=False, target_inter_token_latency=0.03)
    assert first(target) > 1.5 * first(whole_prompts)


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


def test_nothing_is_predicted_without_known_costs() -> None:
    model = forecaster(CostModel())
    assert model.predict([], ahead=(0, 0), num_prompt_tokens=1, max_new_tokens=1) is None
    assert model.drain_seconds([], waiting=(3, 30)) is None


def test_the_queue_drains_entry_by_entry() -> None:
    model = forecaster()
    rng = random.Random(1)
    for _ in range(300):
        model.finished(num_prompt=100, num_generated=exponential(rng), max_new_tokens=LIMIT)
    rows = running(32, left=2000)
    predictions = [
        model.predict(
            rows, ahead=(n - 1, 100 * (n - 1)), num_prompt_tokens=100, max_new_tokens=LIMIT
        )
        for n in (1, 10, 100)
    ]
    one, ten, all_of_them = (each.queue_seconds for each in predictions if each is not None)
    assert 0 < one < ten < all_of_them
    # Places come every mean length / slots steps.
    assert all_of_them == pytest.approx(100 * 82 / 32 * (0.0146 + 32 * 0.0004), rel=0.4)
    drained = model.drain_seconds(rows, waiting=(100, 10_000))
    assert drained is not None
    assert 0 < drained < ten


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
    rows = [Job(100, limit=200, slot=slot, num_computed=100) for slot in range(32)]
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
