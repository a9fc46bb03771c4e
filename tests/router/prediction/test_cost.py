"""The cost model against machines whose costs are known."""

import json
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from millrace_router.prediction.cost import (
    COEFFICIENTS,
    EXTRA_COEFFICIENTS,
    NUM_RATIOS,
    CostModel,
    RouterOverhead,
    StepJitter,
)
from millrace_router.prediction.step_load import StepLoad

SMALL = (0.0146, 0.0004, 1e-7, 0.001, 6e-5, 2.4e-7)
"""Costs of a 135M model on two cores, about."""
COUNTS = ("prefill_tokens", "prefill_pairs", "num_chunks", "decodes", "context")


def costs(values: tuple[float, ...] = SMALL) -> dict[str, float]:
    return dict(zip(COEFFICIENTS, values, strict=True))


def price(load: StepLoad, values: tuple[float, ...] = SMALL) -> float:
    """Written out, as the oracle."""
    step, row, position, prefill_step, token, pair = values
    seconds = step + row * load.decodes + position * load.context
    if load.prefill_tokens:
        seconds += prefill_step + token * load.prefill_tokens + pair * load.prefill_pairs
    return seconds


def chunk(size: int, start: int = 0, decodes: int = 0, context: int = 0) -> StepLoad:
    pairs = size * (start + 1 + start + size) // 2
    return StepLoad(size, pairs, int(size > 0), decodes, context)


def some_load(rng: random.Random) -> StepLoad:
    """A typical load: mostly decodes, sometimes with a chunk."""
    decodes = rng.randint(0, 32)
    context = sum(rng.randint(10, 1000) for _ in range(decodes))
    if decodes and rng.random() < 0.8:
        return StepLoad(decodes=decodes, context=context)
    return chunk(rng.randint(1, 1024), rng.choice([0, 0, 500]), decodes, context)


def trained(
    count: int,
    *,
    seed: int = 1,
    seconds: Callable[[StepLoad, random.Random], float] = lambda load, _: price(load),
) -> CostModel:
    rng, model = random.Random(seed), CostModel()
    for _ in range(count):
        load = some_load(rng)
        model.observe(load, seconds(load, rng))
    return model


def worst_error(model: CostModel, values: tuple[float, ...] = SMALL) -> float:
    rng = random.Random(99)
    loads = [some_load(rng) for _ in range(200)]
    return max(abs((model.seconds(load) or 0.0) / price(load, values) - 1) for load in loads)


LOADS = st.builds(
    StepLoad,
    prefill_tokens=st.integers(0, 4096),
    prefill_pairs=st.integers(0, 10**7),
    num_chunks=st.integers(0, 8),
    decodes=st.integers(0, 256),
    context=st.integers(0, 10**6),
)
SECONDS = st.floats(1e-5, 100)


@settings(deadline=None, max_examples=30)
@given(
    proportions=st.tuples(*[st.floats(0.2, 5)] * 6), scale=st.floats(1e-3, 1e3), seed=st.integers()
)
def test_recovers_any_machine_that_is_linear(
    proportions: tuple[float, ...], scale: float, seed: int
) -> None:
    values = tuple(a * b * scale for a, b in zip(SMALL, proportions, strict=True))
    model = trained(600, seed=seed, seconds=lambda load, _: price(load, values))
    assert worst_error(model, values) < 0.05


@settings(deadline=None, max_examples=15)
@given(seed=st.integers())
def test_recovers_it_from_steps_that_vary_by_a_tenth(seed: int) -> None:
    model = trained(2000, seed=seed, seconds=lambda load, rng: price(load) * rng.uniform(0.9, 1.1))
    assert worst_error(model) < 0.08


@settings(deadline=None, max_examples=15)
@given(seed=st.integers())
def test_delays_of_every_tenth_step_move_it_little(seed: int) -> None:
    # They double the mean: an error of 1, if each counted for what it is.
    def seconds(load: StepLoad, rng: random.Random) -> float:
        return price(load) * (rng.uniform(3, 20) if rng.random() < 0.1 else rng.uniform(0.9, 1.1))

    assert worst_error(trained(2000, seed=seed, seconds=seconds)) < 0.6


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_follows_a_machine_that_became_slower_or_faster(factor: float) -> None:
    model, rng = trained(1500), random.Random(7)
    for _ in range(300):
        load = some_load(rng)
        model.observe(load, factor * price(load))
    assert worst_error(model, tuple(factor * value for value in SMALL)) < 0.3
    for _ in range(6000):
        load = some_load(rng)
        model.observe(load, factor * price(load))
    assert worst_error(model, tuple(factor * value for value in SMALL)) < 0.1


def test_a_short_disturbance_is_forgotten() -> None:
    model, rng = trained(1500), random.Random(8)
    for _ in range(10):
        load = some_load(rng)
        model.observe(load, 20 * price(load))
    assert worst_error(model) < 0.3
    for _ in range(200):
        load = some_load(rng)
        model.observe(load, price(load))
    assert worst_error(model) < 0.1


def test_knows_nothing_before_some_steps() -> None:
    model = CostModel()
    for _ in range(7):
        assert model.seconds(chunk(100)) is None
        model.observe(StepLoad(decodes=1, context=10), 0.01)
    assert model.to_json() == {}
    assert (
        model.prefill_tokens_within(1e-9, decodes=1, context=9, start=0, least=16, most=512) == 512
    )
    model.observe(StepLoad(decodes=1, context=10), 0.01)
    assert model.seconds(StepLoad(decodes=1, context=10)) == pytest.approx(0.01, rel=1e-3)


def test_rows_never_seen_are_neither_free_nor_as_dear_as_the_step() -> None:
    model = CostModel()
    model.observe(chunk(128), 0.03)
    for position in range(500):
        model.observe(StepLoad(decodes=1, context=128 + position), 0.015)
    one, many = (model.seconds(StepLoad(decodes=n, context=200 * n)) for n in (1, 256))
    assert one == pytest.approx(0.015, rel=0.02)
    # 32 rows as dear as the step, and a position of context a thousandth of a row.
    assert many == pytest.approx(0.015 * (1 + 8 + 1.6) / (1 + 1 / 32), rel=0.3)


def test_prompts_are_remembered_through_a_long_time_of_decodes() -> None:
    model = trained(1500)
    for position in range(5000):
        load = StepLoad(decodes=4, context=4 * (100 + position % 500))
        model.observe(load, price(load))
    assert model.seconds(chunk(700)) == pytest.approx(price(chunk(700)), rel=0.05)


@settings(deadline=None, max_examples=60)
@given(observed=st.lists(st.tuples(LOADS, SECONDS), min_size=8, max_size=80))
def test_whatever_was_observed_no_cost_is_negative(
    observed: list[tuple[StepLoad, float]],
) -> None:
    model = CostModel()
    for load, seconds in observed:
        model.observe(load, seconds)
    values = model.to_json().values()
    assert all(0 <= value < float("inf") for value in values)


@settings(deadline=None, max_examples=60)
@given(
    observed=st.lists(st.tuples(LOADS, SECONDS), min_size=20, max_size=40),
    load=LOADS,
    count=st.sampled_from(COUNTS),
    more=st.integers(1, 1000),
)
def test_more_of_anything_is_never_cheaper(
    observed: list[tuple[StepLoad, float]], load: StepLoad, count: str, more: int
) -> None:
    model = CostModel()
    for other, seconds in observed:
        model.observe(other, seconds)
    before = model.seconds(load)
    assume(before is not None)
    setattr(load, count, getattr(load, count) + more)
    after = model.seconds(load)
    assert before is not None
    assert after is not None
    assert after >= before


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_step_without_a_duration_says_nothing(seconds: float) -> None:
    model = trained(100)
    before = model.to_json()
    for _ in range(100):
        model.observe(chunk(10), seconds)
        model.observe(StepLoad(), 1.0)
    assert model.to_json() == before


@settings(deadline=None, max_examples=150)
@given(
    values=st.tuples(*[st.one_of(st.just(0.0), st.floats(1e-9, 1e-2))] * 6),
    seconds=st.floats(1e-4, 10),
    decodes=st.integers(0, 64),
    start=st.integers(0, 4000),
    least=st.integers(1, 64),
    span=st.integers(0, 4000),
)
def test_the_chunk_that_fits_is_the_largest_one(
    values: tuple[float, ...], seconds: float, decodes: int, start: int, least: int, span: int
) -> None:
    model = CostModel.fixed(costs(values))
    context, most = 100 * decodes, least + span
    found = model.prefill_tokens_within(
        seconds, decodes=decodes, context=context, start=start, least=least, most=most
    )
    assert least <= found <= most
    if found > least:
        assert price(chunk(found, start, decodes, context), values) <= seconds * (1 + 1e-9)
    if found < most:
        assert price(chunk(found + 1, start, decodes, context), values) >= seconds * (1 - 1e-9)


def test_chunks_shrink_with_the_pace() -> None:
    model, rng = trained(1500), random.Random(3)
    wanted = {"decodes": 8, "context": 2000, "start": 0, "least": 16, "most": 4096}
    before = model.prefill_tokens_within(0.1, **wanted)
    for _ in range(300):
        load = some_load(rng)
        model.observe(load, 2 * price(load))
    assert 16 < model.prefill_tokens_within(0.1, **wanted) < 0.7 * before


def test_json_carries_the_costs_to_a_model_that_learns_nothing() -> None:
    model = trained(500)
    copy = CostModel.from_json(json.loads(json.dumps(model.to_json())))
    load = chunk(100, 20, 3, 400)
    before = copy.seconds(load)
    assert before == pytest.approx(model.seconds(load), rel=0.05)
    for _ in range(100):
        copy.observe(load, 1000.0)
    assert copy.seconds(load) == before
    assert copy.to_json() == model.to_json()
    assert CostModel.from_json({}).seconds(load) is None


def test_json_leaves_out_what_may_pass_in_seconds() -> None:
    model, rng, load = trained(1500), random.Random(3), chunk(100, 20, 3, 400)
    before = model.seconds(load) or 0.0
    for _ in range(40):
        slow = some_load(rng)
        model.observe(slow, 1.5 * price(slow))
    assert (model.seconds(load) or 0.0) > 1.15 * before
    copy = CostModel.from_json(model.to_json())
    assert copy.seconds(load) == pytest.approx(before, rel=0.1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": 1.0},
        costs() | {"more": 1.0},
        costs() | {"step": -1.0},
        costs() | {"decode_row": float("nan")},
        costs() | {"prefill_pair": float("inf")},
    ],
)
def test_wrong_costs_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="cost"):
        CostModel.fixed(wrong)


def extra_price(load: StepLoad, once: float, each: float) -> float:
    return price(load) + (once + each * load.extra_positions if load.extra_positions else 0.0)


def with_extra(number: int, rng: random.Random) -> StepLoad:
    """Draft tokens for most decodes of a batch of any size, which attend to as much as others."""
    decodes = 1 + number * 7 % 32
    extra = sum(rng.randint(1, 4) for _ in range(decodes))
    return StepLoad(decodes=decodes, context=500 * (decodes + extra), extra_positions=extra)


@pytest.mark.parametrize("noise", [1.0, 3.0])
@pytest.mark.parametrize(("once", "each"), [(0.0, 0.0004), (0.01, 0.0004), (0.002, 0.004)])
def test_learns_what_extra_positions_cost_and_of_plain_steps_keeps_what_it_knew(
    once: float, each: float, noise: float
) -> None:
    """The result holds if another process delays every eighth of these steps."""
    model, rng = trained(1500), random.Random(4)
    before = model.to_json()
    for number in range(200):
        load = with_extra(number, rng)
        late = noise if number % 8 == 3 else 1.0
        model.observe(load, late * extra_price(load, once, each))
    for number in range(40):
        load = with_extra(number, rng)
        exact = extra_price(load, once, each)
        assert model.seconds(load) == pytest.approx(exact, rel=0.2 if noise == 1.0 else 0.3)
    after = model.to_json()
    assert [before[name] for name in COEFFICIENTS] == [after[name] for name in COEFFICIENTS]
    prices = model.extra_prices()
    assert prices is not None
    load = StepLoad(decodes=8, context=4000, extra_positions=12)
    plain = StepLoad(decodes=8, context=4000)
    assert sum(prices[:2]) + 11 * prices[1] == pytest.approx(
        (model.seconds(load) or 0.0) - (model.seconds(plain) or 0.0)
    )


def test_a_few_steps_suffice_where_extra_positions_cost_many_rows() -> None:
    """Or a machine on which they cost five steps would make hundreds of them."""
    model = trained(1500)
    load = StepLoad(decodes=4, context=2000, extra_positions=8)
    for _ in range(6):
        model.observe(load, extra_price(load, 0.1, 0.0004))
    assert (model.seconds(load) or 0.0) > 2.5 * price(load)


def test_one_step_that_was_held_up_says_little() -> None:
    model = trained(1500)
    load = StepLoad(decodes=4, context=2000, extra_positions=8)
    before = model.seconds(load) or 0.0
    model.observe(load, 10 * before)
    assert (model.seconds(load) or 0.0) < 1.6 * before


def test_a_bad_impression_fades_in_steps_without_extra_positions() -> None:
    model, rng = trained(1500), random.Random(2)
    load = StepLoad(decodes=4, context=2000, extra_positions=8)
    before = model.seconds(load) or 0.0
    for _ in range(10):
        model.observe(load, 10 * before)
    assert (model.seconds(load) or 0.0) > 2 * before
    for _ in range(12000):
        other = some_load(rng)
        model.observe(other, price(other))
    assert (model.seconds(load) or 0.0) == pytest.approx(before, rel=0.1)


def test_until_then_an_extra_position_costs_what_a_row_does() -> None:
    model = trained(1500)
    known = model.to_json()
    assert set(known) == {*COEFFICIENTS, *EXTRA_COEFFICIENTS}
    copy = CostModel.from_json(known)
    assert copy.extra_prices() == (0.0, known["decode_row"], known["decode_context_token"])
    prices, plain = model.extra_prices(), StepLoad(decodes=8, context=4000)
    pace = (model.seconds(plain) or 0.0) / (copy.seconds(plain) or 1.0)
    assert prices == pytest.approx(tuple(pace * price for price in copy.extra_prices() or ()))
    assert CostModel().extra_prices() is None
    assert CostModel.fixed(costs()).extra_prices() == (0.0, SMALL[1], SMALL[2])


def test_extra_positions_leave_less_for_prompts() -> None:
    model = CostModel.fixed(costs() | dict(zip(EXTRA_COEFFICIENTS, (0.01, 0.001), strict=True)))
    wanted = {"decodes": 8, "context": 4000, "start": 0, "least": 16, "most": 4096}
    for number in (0, 10, 40):
        found = model.prefill_tokens_within(0.1, extra_positions=number, **wanted)
        for size, fits in ((found, True), (found + 1, False)):
            load = chunk(size, 0, 8, 4000)
            load.extra_positions = number
            assert ((model.seconds(load) or 0.0) <= 0.1) is fits, number
    assert CostModel.from_json(model.to_json()).to_json() == model.to_json()


def test_a_step_without_a_time_limit_takes_all_prompt_tokens_even_if_positions_cost_nothing() -> (
    None
):
    model = CostModel.fixed(dict.fromkeys(COEFFICIENTS, 0.001) | {"prefill_pair": 0.0})
    assert model.prompt_tokens_within(math.inf, start=7, most=512) == 512


def test_nothing_is_said_of_few_steps() -> None:
    jitter = StepJitter()
    for _ in range(NUM_RATIOS - 1):
        jitter.add(1.0)
    assert jitter.ratios() == []


@given(st.lists(st.floats(0.01, 100.0), min_size=NUM_RATIOS, max_size=NUM_RATIOS + 50))
def test_ratios_are_those_of_the_last_steps_in_their_order_about_one(seen: list[float]) -> None:
    jitter = StepJitter()
    for ratio in seen:
        jitter.add(ratio)
    ratios, last = jitter.ratios(), seen[-NUM_RATIOS:]
    assert sum(ratios) / NUM_RATIOS == pytest.approx(1.0)
    assert ratios == pytest.approx([ratio * NUM_RATIOS / sum(last) for ratio in last])


def test_a_cost_model_sees_how_steps_of_one_load_differ() -> None:
    cost = CostModel()
    for number in range(600):
        cost.observe(StepLoad(decodes=4, context=400), 0.010 if number % 2 else 0.014)
    *_, slow, fast = cost.jitter.ratios()
    assert slow == pytest.approx(14 / 12, rel=0.02)
    assert fast == pytest.approx(10 / 12, rel=0.02)


def test_known_costs_learn_nothing_of_it() -> None:
    cost = CostModel.fixed(dict.fromkeys(COEFFICIENTS, 0.001))
    for _ in range(600):
        cost.observe(StepLoad(decodes=4, context=400), 0.010)
    assert cost.jitter.ratios() == []


def test_one_slow_answer_moves_little() -> None:
    overhead = RouterOverhead()
    assert overhead.turn_seconds == 0.0
    for _ in range(1000):
        overhead.add_answer(0.001)
    overhead.add_answer(0.065)
    assert overhead.turn_seconds == pytest.approx(0.002, rel=0.01)


def test_a_burst_of_entries_is_soon_forgotten() -> None:
    overhead = RouterOverhead()
    assert overhead.entry_seconds == 0.0
    for seconds in [*([0.5] * 200), *([0.001] * 40)]:
        overhead.add_entry(seconds)
    assert overhead.entry_seconds == 0.001
