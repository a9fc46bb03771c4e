"""Forecasts for batches whose results can be calculated, and under load."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.simulate.deployment import Deployment
from millrace.simulate.pipeline import Flight
from millrace.simulate.simulated_request import Arrival
from millrace_router.prediction.cost import COEFFICIENTS, CostModel
from millrace_router.prediction.forecast import Forecaster
from millrace_router.prediction.late_planning import LatePlanning
from millrace_router.prediction.step_load import StepLoad
from millrace_router.prediction.traffic import AnswerLengths, TrafficStatistics
from millrace_testing.router.watched_engine import COSTS, WatchedEngine, watched

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
        model.traffic.finished(num_prompt=100, num_generated=length, max_new_tokens=LIMIT)
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
    prediction = forecaster().predict([], ahead=(0, 0), num_prompt_tokens=500, max_new_tokens=101)
    assert prediction is not None
    assert prediction.queue_seconds == 0.0
    # A chunk is priced with the decode in the same step.
    prefill = 0.0146 + 0.001 + 0.0004 + 6e-5 * 500 + 2.4e-7 * 500 * 501 / 2
    assert prediction.first_token_seconds == pytest.approx(prefill, rel=0.01)
    decode = 0.0146 + 0.0004 + 1e-7 * 550
    assert prediction.finish_seconds == pytest.approx(prefill + 100 * decode, rel=0.01)


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


def test_with_a_free_slot_a_request_waits_only_for_the_step_in_flight() -> None:
    step = 0.0146 + 32 * 0.0004
    for elapsed in (0.0, 0.01, 9.9):
        prediction = forecaster().predict(
            running(31, left=500),
            ahead=(0, 0),
            num_prompt_tokens=10,
            max_new_tokens=10,
            now_in_step=elapsed,
        )
        assert prediction is not None
        assert prediction.queue_seconds == pytest.approx(max(0.0, step - elapsed), rel=0.05)


def test_a_full_batch_is_waited_for() -> None:
    rows = running(31, left=500) + running(1, left=40)
    rows[-1].slot = 31
    prediction = forecaster().predict(rows, ahead=(0, 0), num_prompt_tokens=10, max_new_tokens=10)
    assert prediction is not None
    assert prediction.queue_seconds == pytest.approx(43 * (0.0146 + 32 * 0.0004), rel=0.05)


def test_of_many_answers_of_unknown_length_one_ends_soon() -> None:
    model, rng = forecaster(), random.Random(1)
    for _ in range(500):
        model.traffic.finished(num_prompt=100, num_generated=exponential(rng), max_new_tokens=LIMIT)
    prediction = model.predict(
        running(32, left=2000), ahead=(0, 0), num_prompt_tokens=10, max_new_tokens=10
    )
    assert prediction is not None
    # The least of 32 exponential lengths is a 32nd of one; each has 80 steps left on average.
    steps = prediction.queue_seconds / (0.0146 + 32 * 0.0004)
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
        prediction = model.predict(
            running(8, left=500),
            ahead=(0, 0),
            num_prompt_tokens=1000,
            max_new_tokens=10,
            num_cached=num_cached,
        )
        assert prediction is not None
        return prediction.first_token_seconds

    assert first(forecaster(), num_cached=992) < 0.3 * first(forecaster())
    whole_prompts = forecaster(target_inter_token_latency=0.5)
    target = forecaster(target_inter_token_latency=0.03)
    assert 1.5 * first(whole_prompts) < first(target)
    assert first(whole_prompts) < first(forecaster()) < first(target)


def test_cached_prompts_of_the_past_make_those_ahead_cheaper() -> None:
    def queue(num_cached: int) -> float:
        model = forecaster()
        for _ in range(300):
            model.traffic.finished(
                num_prompt=1000, num_generated=10, max_new_tokens=10, num_cached=num_cached
            )
        prediction = model.predict(
            [], ahead=(20, 20_000), num_prompt_tokens=1000, max_new_tokens=10
        )
        assert prediction is not None
        return prediction.queue_seconds

    assert queue(900) < 0.2 * queue(0)


def test_the_forecast_learns_the_length_of_answers() -> None:
    def finish(model: Forecaster) -> float:
        prediction = model.predict([], ahead=(0, 0), num_prompt_tokens=100, max_new_tokens=LIMIT)
        assert prediction is not None
        return prediction.finish_seconds

    model = forecaster()
    before = finish(model)
    rng = random.Random(1)
    for _ in range(500):
        model.traffic.finished(num_prompt=100, num_generated=exponential(rng), max_new_tokens=LIMIT)
    assert before == pytest.approx(LIMIT * 0.015, rel=0.1)
    assert finish(model) == pytest.approx(80 * 0.015, rel=0.3)


def test_statistics_that_continue_in_another_process_forecast_the_same() -> None:
    traffic = TrafficStatistics()
    for length, limit in ((10, 20), (20, 20), (7, 50)):
        traffic.finished(
            num_prompt=100, num_generated=length, max_new_tokens=limit, num_cached=length
        )
    traffic.yielded(30, 10)
    copy = TrafficStatistics.resumed(json.loads(json.dumps(traffic.learned())))
    assert copy.learned() == traffic.learned()
    assert copy.lengths.expected(60) == traffic.lengths.expected(60)
    assert copy.mean_steps(5) == traffic.mean_steps(5)


def test_nothing_is_predicted_without_known_costs() -> None:
    model = forecaster(CostModel())
    assert model.predict([], ahead=(0, 0), num_prompt_tokens=1, max_new_tokens=1) is None
    assert model.drain_seconds([], waiting=(3, 30)) is None


def test_the_queue_drains_entry_by_entry() -> None:
    model = forecaster()
    rng = random.Random(1)
    for _ in range(300):
        model.traffic.finished(num_prompt=100, num_generated=exponential(rng), max_new_tokens=LIMIT)
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
            oracle.traffic.yielded(32 * tokens_per_row, 32)
        prediction = oracle.predict(
            rows, ahead=(0, 0), num_prompt_tokens=10, max_new_tokens=200, num_cached=0
        )
        assert prediction is not None
        found.append(prediction)
    one, two = found
    assert one.queue_seconds == pytest.approx(2 * two.queue_seconds, rel=0.05)
    last = [each.finish_seconds - each.first_token_seconds for each in found]
    assert last[0] == pytest.approx(2 * last[1], rel=0.01)


def poisson(
    seed: int, count: int, rate: float, length: Callable[[random.Random], int]
) -> list[Arrival]:
    rng, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        prompt = max(1, int(rng.lognormvariate(5, 0.6)))
        arrivals.append(Arrival(now, prompt, length(rng), LIMIT))
    return arrivals


def heavy_tail(rng: random.Random) -> int:
    return min(2000, 1 + int(rng.lognormvariate(4, 0.8)))


def served(arrivals: list[Arrival], **flags: object) -> WatchedEngine:
    return watched(arrivals, **({"max_batch_prefill_tokens": 1024} | flags))


def errors(engine: WatchedEngine, *, warm: int = 200, least: float = 0.5) -> list[float]:
    """Signed relative errors of the queue time of requests that waited, except the first `warm` requests."""
    return [
        engine.predictions[number].queue_seconds / waited - 1
        for number, waited in engine.queue.items()
        if number >= warm and waited >= least
    ]


SCENARIOS: dict[str, tuple[list[Arrival], dict[str, object], float, float]] = {
    "equal lengths": (poisson(1, 1000, 12, lambda _: 80), {}, 0.08, 0.05),
    "memoryless lengths": (poisson(1, 1000, 12, exponential), {}, 0.2, 0.1),
    "heavy tail": (poisson(2, 1000, 13, heavy_tail), {}, 0.2, 0.1),
    "bursts": (
        [
            Arrival(60.0 * burst, 150, heavy_tail(random.Random(1000 * burst + number)), LIMIT)
            for burst in range(6)
            for number in range(200)
        ],
        {},
        0.2,
        0.15,
    ),
    "few blocks": (
        [each._replace(max_new_tokens=None) for each in poisson(2, 1000, 6, heavy_tail)],
        {"num_blocks": 150, "max_total_tokens": 2384, "max_input_tokens": 2000},
        0.35,
        0.2,
    ),
}
"""Arrivals, flags, bounds of the median relative error of the queue time and of its bias."""


PIPELINES = pytest.mark.parametrize(
    "pipeline",
    [{"late_planning": "off"}, {}, {"steps_in_flight": 1}],
    ids=["early", "late", "one step in flight"],
)


@PIPELINES
@pytest.mark.parametrize("name", SCENARIOS)
def test_queue_time_under_load_is_predicted(name: str, pipeline: dict[str, object]) -> None:
    arrivals, flags, most, bias = SCENARIOS[name]
    misses = errors(served(arrivals, **flags, **pipeline))
    assert len(misses) > 300
    assert median(map(abs, misses)) < most
    assert abs(median(misses)) < bias


@PIPELINES
def test_first_token_is_predicted_with_and_without_a_queue(pipeline: dict[str, object]) -> None:
    for rate, most in ((4, 0.1), (12, 0.2)):
        engine = served(poisson(3, 800, rate, exponential), **pipeline)
        predicted = [each.first_token_seconds for each in engine.predictions]
        misses = [abs(predicted[n] / engine.first[n] - 1) for n in range(200, 800)]
        assert median(misses) < most


@PIPELINES
@pytest.mark.parametrize("order", ["shortest", "arrival"])
def test_the_first_token_of_short_prompts_among_long_ones_is_predicted(
    order: str, pipeline: dict[str, object]
) -> None:
    """Every tenth prompt takes some steps; the predicted delay of short ones follows the order of service."""
    rng, now, arrivals = random.Random(7), 0.0, []
    for number in range(600):
        now += rng.expovariate(3)
        arrivals.append(Arrival(now, 3000 if number % 10 == 0 else 30, exponential(rng), LIMIT))
    engine = served(arrivals, prefill_order=order, **pipeline)
    shorts = [n for n in range(200, 600) if arrivals[n].prompt_tokens == 30]
    found = [engine.predictions[n].first_token_seconds / engine.first[n] - 1 for n in shorts]
    assert median(map(abs, found)) < 0.2
    assert abs(median(found)) < 0.1
    # Requests that came with a long prompt are the slow ones.
    slow = sorted(shorts, key=lambda n: engine.first[n])[-len(shorts) // 5 :]
    wrong = [engine.predictions[n].first_token_seconds / engine.first[n] - 1 for n in slow]
    assert median(map(abs, wrong)) < 0.35


@pytest.mark.parametrize("rate", [4, 10, 12])
def test_the_end_is_predicted_if_lengths_are_equal(rate: int) -> None:
    engine = served(poisson(4, 800, rate, lambda _: 80))
    predicted = [each.finish_seconds for each in engine.predictions]
    misses = [predicted[n] / engine.last[n] - 1 for n in range(200, 800)]
    assert median(map(abs, misses)) < 0.1
    assert abs(median(misses)) < 0.03


def test_limits_that_are_always_met_are_known_lengths() -> None:
    arrivals = poisson(5, 1000, 13, exponential)
    met = [each._replace(max_new_tokens=each.output_tokens) for each in arrivals]
    misses = errors(served(met))
    assert len(misses) > 200
    assert median(map(abs, misses)) < 0.12


def test_the_forecast_works_with_costs_learned_from_noisy_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, learned, known = random.Random(6), CostModel(), CostModel.fixed(COST)
    ratios = [rng.uniform(0.9, 1.1) * (5 if rng.random() < 0.02 else 1) for _ in range(2000)]
    for load in (StepLoad(500, 125_000, 1), *(StepLoad(decodes=n, context=n) for n in range(1, 9))):
        learned.observe(load, known.seconds(load) or 0.0)
    init, answer = WatchedEngine.__init__, WatchedEngine._answer

    def with_learned(self: WatchedEngine, deployment: Deployment) -> None:
        init(self, deployment)
        self._admission.forecaster._cost = learned

    def observed(self: WatchedEngine, flight: Flight) -> None:
        learned.observe(flight.plan.load, flight.seconds)
        answer(self, flight)

    monkeypatch.setattr(WatchedEngine, "__init__", with_learned)
    monkeypatch.setattr(WatchedEngine, "_answer", observed)
    mean = sum(ratios) / len(ratios)
    found = errors(served(poisson(6, 1000, 12 / mean, heavy_tail), step_ratios=tuple(ratios)))
    assert len(found) > 300
    assert median(map(abs, found)) < 0.25


LENGTHS = st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), max_size=80)


def learned(pairs: list[tuple[int, int]]) -> AnswerLengths:
    lengths = AnswerLengths()
    for natural, limit in pairs:
        lengths.add(min(natural, limit), limit)
    return lengths


def exponential_gaps(seed: int, count: int, average: float) -> list[int]:
    rng = random.Random(seed)
    return [1 + int(rng.expovariate(1 / average)) for _ in range(count)]


def test_before_any_answer_the_limit_is_expected() -> None:
    lengths = AnswerLengths()
    assert lengths.expected(100) == 100
    assert lengths.quantile_left(10, 100, 0.1) == 90
    assert list(lengths.recent) == []


def test_answers_that_always_meet_their_limit_are_expected_to() -> None:
    lengths = learned([(9999, limit) for limit in range(10, 300)])
    assert lengths.expected(4000) == pytest.approx(4000)
    assert lengths.quantile_left(5, 4000, 0.95) == 3995


def test_limits_of_some_do_not_shorten_the_answers_of_others() -> None:
    naturals = exponential_gaps(1, 2000, 200)
    lengths = learned([(n, 50 if i % 2 else 4000) for i, n in enumerate(naturals)])
    assert lengths.expected(4000) == pytest.approx(200, rel=0.25)
    assert lengths.expected(50) == pytest.approx(mean(min(n, 50) for n in naturals), rel=0.1)


def test_expected_length_is_the_mean_up_to_the_limit() -> None:
    rng = random.Random(3)
    naturals = [1 + int(rng.lognormvariate(4.5, 0.7)) for _ in range(4000)]
    lengths = learned([(n, 4000) for n in naturals])
    for limit in (50, 100, 400, 4000):
        expected = mean(min(n, limit) for n in naturals)
        assert lengths.expected(limit) == pytest.approx(expected, rel=0.1)


def test_quantiles_are_exceeded_as_often_as_their_share() -> None:
    naturals = exponential_gaps(4, 3000, 100)
    lengths = learned([(n, 4000) for n in naturals])
    for share in (0.1, 0.5, 0.9):
        quantile = lengths.quantile_left(50, 4000, 1.0 - share)
        exceeding = [n > 50 + quantile for n in naturals if n > 50]
        assert mean(exceeding) == pytest.approx(share, abs=0.06)


def test_traffic_that_changes_is_followed() -> None:
    lengths = learned([(n, 4000) for n in exponential_gaps(5, 1500, 300)])
    for natural in exponential_gaps(6, 1500, 30):
        lengths.add(natural, 4000)
    assert lengths.expected(4000) == pytest.approx(30, rel=0.25)


@settings(deadline=None, max_examples=200)
@given(
    pairs=LENGTHS, so_far=st.integers(0, 6000), left=st.integers(0, 6000), share=st.floats(0, 0.999)
)
def test_tokens_left_stay_within_the_limit(
    pairs: list[tuple[int, int]], so_far: int, left: int, share: float
) -> None:
    lengths = learned(pairs)
    limit = so_far + left
    assert 0 <= lengths.quantile_left(so_far, limit, share) <= left
    assert 0 <= lengths.expected(limit) <= limit + 1e-6
    assert lengths.expected(limit) <= lengths.expected(limit + 9) + 1e-6


def test_answers_without_tokens_are_ignored() -> None:
    lengths = learned([])
    lengths.add(0, 10)
    assert lengths.expected(10) == 10
