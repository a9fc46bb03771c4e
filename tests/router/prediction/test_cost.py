"""The cost model against machines whose costs are known."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from random import Random

import numpy as np
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
from millrace_router.prediction.late_planning import LEAD_SECONDS, MOST, LatePlanning
from millrace_router.prediction.least_squares import solve_nonnegative
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
def test_the_cost_model_recovers_any_machine_that_is_linear(
    proportions: tuple[float, ...], scale: float, seed: int
) -> None:
    values = tuple(a * b * scale for a, b in zip(SMALL, proportions, strict=True))
    model = trained(600, seed=seed, seconds=lambda load, _: price(load, values))
    assert worst_error(model, values) < 0.05


@settings(deadline=None, max_examples=15)
@given(seed=st.integers())
def test_the_cost_model_recovers_costs_from_steps_that_vary_by_a_tenth(seed: int) -> None:
    model = trained(2000, seed=seed, seconds=lambda load, rng: price(load) * rng.uniform(0.9, 1.1))
    assert worst_error(model) < 0.08


@settings(deadline=None, max_examples=15)
@given(seed=st.integers())
def test_delays_of_every_tenth_step_change_the_cost_model_little(seed: int) -> None:
    # They double the mean: an error of 1, if each counted for what it is.
    def seconds(load: StepLoad, rng: random.Random) -> float:
        return price(load) * (rng.uniform(3, 20) if rng.random() < 0.1 else rng.uniform(0.9, 1.1))

    assert worst_error(trained(2000, seed=seed, seconds=seconds)) < 0.6


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_the_cost_model_follows_a_machine_that_became_slower_or_faster(factor: float) -> None:
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


def tokens_within(
    model: CostModel, seconds: float, load: StepLoad, *, start: int = 0, most: int = 4096
) -> int:
    """Prompt tokens that keep a step of this load within `seconds`."""
    rest = model.seconds_for_prompts(seconds, load)
    return model.prompt_tokens_within(rest, start=start, most=most)


def test_the_cost_model_knows_nothing_before_some_steps() -> None:
    model = CostModel()
    for _ in range(7):
        assert model.seconds(chunk(100)) is None
        model.observe(StepLoad(decodes=1, context=10), 0.01)
    assert model.to_json() == {}
    assert tokens_within(model, 1e-9, StepLoad(decodes=1, context=9), most=512) == 512
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
def test_no_observations_make_a_cost_negative(
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
def test_steps_without_a_duration_are_ignored(seconds: float) -> None:
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
    most=st.integers(1, 4000),
)
def test_the_chunk_that_fits_is_the_largest_one(
    values: tuple[float, ...], seconds: float, decodes: int, start: int, most: int
) -> None:
    model, context = CostModel.fixed(costs(values)), 100 * decodes
    load = StepLoad(decodes=decodes, context=context)
    num_tokens = tokens_within(model, seconds, load, start=start, most=most)
    assert 0 <= num_tokens <= most
    if num_tokens:
        assert price(chunk(num_tokens, start, decodes, context), values) <= seconds * (1 + 1e-9)
    if num_tokens < most:
        assert price(chunk(num_tokens + 1, start, decodes, context), values) >= seconds * (1 - 1e-9)


def test_tiles_have_a_cost_of_their_own() -> None:
    model, plain, rng = trained(500), trained(500), random.Random(3)
    assert model.seconds(StepLoad(tiles=1)) is None
    assert "tile" not in model.to_json()
    for _ in range(200):
        model.observe(StepLoad(tiles=1), 0.3 * rng.uniform(0.9, 1.1))
    assert model.seconds(StepLoad(tiles=2)) == pytest.approx(0.6, rel=0.05)
    # One that took a minute counts as twice as long as others.
    model.observe(StepLoad(tiles=1), 60.0)
    assert model.tile_seconds == pytest.approx(0.32, rel=0.06)
    assert model.seconds(chunk(100, 20, 3, 400)) == plain.seconds(chunk(100, 20, 3, 400))
    assert CostModel.fixed(model.to_json()).tile_seconds == model.tile_seconds
    assert CostModel.resumed(model.learned()).tile_seconds == model.tile_seconds


def test_chunks_shrink_with_the_pace() -> None:
    model, rng = trained(1500), random.Random(3)
    step = StepLoad(decodes=8, context=2000)
    before = tokens_within(model, 0.1, step)
    for _ in range(300):
        load = some_load(rng)
        model.observe(load, 2 * price(load))
    assert 16 < tokens_within(model, 0.1, step) < 0.7 * before


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


@pytest.mark.parametrize("count", [0, 5, 40, 700])
def test_a_model_that_continues_in_another_process_predicts_the_same_bits(count: int) -> None:
    rng, model = Random(3), CostModel()

    def observe(*models: CostModel) -> None:
        load = some_load(rng)
        extra = rng.choice([0, 0, 3]) if load.decodes else 0
        load = replace(load, extra_positions=extra, adapter_slices=rng.choice([0, 40]))
        for each in models:
            each.observe(load, price(load) * rng.uniform(0.9, 1.1))

    for _ in range(count):
        observe(model)
    # The step after one with extra positions is seen as its second half.
    model.observe(StepLoad(decodes=1), 0.02)
    copy = CostModel.resumed(json.loads(json.dumps(model.learned())))
    for _ in range(100):
        state = rng.getstate()
        observe(model)
        rng.setstate(state)
        observe(copy)
        load = some_load(rng)
        assert copy.seconds(load) == model.seconds(load)
        assert copy.jitter.ratios() == model.jitter.ratios()
    assert copy.is_known


def test_costs_in_json_leave_out_a_temporary_slowdown() -> None:
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
def test_costs_of_extra_positions_are_learned_and_plain_costs_kept(
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


def test_one_delayed_step_counts_little() -> None:
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


def test_an_extra_position_costs_as_much_as_a_row_until_it_is_observed() -> None:
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
    for number in (0, 10, 40):
        step = StepLoad(decodes=8, context=4000, extra_positions=number)
        num_tokens = tokens_within(model, 0.1, step)
        for size, fits in ((num_tokens, True), (num_tokens + 1, False)):
            load = chunk(size, 0, 8, 4000)
            load.extra_positions = number
            assert ((model.seconds(load) or 0.0) <= 0.1) is fits, number
    assert CostModel.from_json(model.to_json()).to_json() == model.to_json()


def test_a_step_without_a_time_limit_takes_all_prompt_tokens_even_if_positions_cost_nothing() -> (
    None
):
    model = CostModel.fixed(dict.fromkeys(COEFFICIENTS, 0.001) | {"prefill_pair": 0.0})
    assert model.prompt_tokens_within(math.inf, start=7, most=512) == 512


def test_few_steps_yield_no_ratios() -> None:
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


def test_known_costs_learn_no_ratios() -> None:
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


NUMBERS = st.floats(-10, 10, allow_subnormal=False)


def cost(gram: np.ndarray, moment: np.ndarray, x: np.ndarray) -> float:
    return float(x @ gram @ x / 2 - moment @ x)


def best_of_all_sets(gram: np.ndarray, moment: np.ndarray) -> float:
    """The least cost: at the optimum, some set of unknowns solves its own equations and is not negative."""
    least, size = 0.0, len(moment)
    for count in range(1, size + 1):
        for chosen in map(list, combinations(range(size), count)):
            x = np.zeros(size)
            x[chosen] = np.linalg.solve(gram[np.ix_(chosen, chosen)], moment[chosen])
            if (x >= 0).all():
                least = min(least, cost(gram, moment, x))
    return least


@settings(deadline=None, max_examples=300)
@given(data=st.data(), size=st.integers(1, 6))
def test_no_set_of_positive_unknowns_does_better(data: st.DataObject, size: int) -> None:
    factor = np.array(data.draw(st.lists(NUMBERS, min_size=size * size, max_size=size * size)))
    factor = factor.reshape(size, size)
    gram = factor.T @ factor + 0.01 * np.eye(size)
    moment = np.array(data.draw(st.lists(NUMBERS, min_size=size, max_size=size)))
    x = np.array(solve_nonnegative(gram.tolist(), moment.tolist()))
    assert (x >= 0).all()
    least = best_of_all_sets(gram, moment)
    assert cost(gram, moment, x) <= least + 1e-6 * (1 + abs(least))


def test_without_bounds_in_the_way_it_is_the_plain_solution() -> None:
    assert solve_nonnegative([[2.0, 0.0], [0.0, 4.0]], [2.0, 2.0]) == [1.0, 0.5]


def test_where_everything_would_be_negative_all_is_zero() -> None:
    assert solve_nonnegative([[2.0, 0.0], [0.0, 4.0]], [-1.0, -1.0]) == [0.0, 0.0]


BASE = dict(zip(COEFFICIENTS, (0.01, 0.0005, 1e-7, 0.001, 0.0004, 1e-8), strict=True))
TRUTH = BASE | {"adapter_byte": 3e-11, "adapter_slice": 2e-8}


def random_load(random: Random, *, num_adapters: int | None = None) -> StepLoad:
    decodes = random.randint(1, 32)
    number = random.randint(0, decodes) if num_adapters is None else min(num_adapters, decodes)
    prompt = random.choice([0, 0, 0, 200])
    return StepLoad(
        decodes=decodes,
        context=decodes * random.randint(10, 500),
        prefill_tokens=prompt,
        prefill_pairs=prompt * 100,
        num_chunks=int(prompt > 0),
        adapter_bytes=number * random.choice([1, 5]) * 2_000_000,
        adapter_slices=number and 210 * random.randint(number, decodes),
    )


def learned(*, share: float) -> CostModel:
    """A model that observed steps, of which `share` have adapters."""
    truth, model, random = CostModel.fixed(TRUTH), CostModel(), Random(1)
    for number in range(3000):
        has_adapters = number > 100 and random.random() < share
        load = random_load(random, num_adapters=None if has_adapters else 0)
        model.observe(load, (truth.seconds(load) or 0.0) * random.uniform(0.95, 1.05))
    return model


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_steps_with_and_without_adapters_are_predicted(share: float) -> None:
    truth, model, random = CostModel.fixed(TRUTH), learned(share=share), Random(2)
    for num_adapters in (0, 1, 8, 32):
        for _ in range(50):
            load = random_load(random, num_adapters=num_adapters)
            assert model.seconds(load) == pytest.approx(truth.seconds(load), rel=0.12)


def test_models_without_adapters_have_no_adapter_coefficients() -> None:
    assert set(learned(share=0.0).to_json()) & {"adapter_byte", "adapter_slice"} == set()
    again = CostModel.from_json(learned(share=0.5).to_json())
    load = StepLoad(decodes=8, context=800, adapter_bytes=40_000_000, adapter_slices=1680)
    plain = StepLoad(decodes=8, context=800)
    assert (again.seconds(load) or 0.0) > (again.seconds(plain) or 0.0)


COST = CostModel.fixed(dict.fromkeys(COEFFICIENTS, 0.0) | {"decode_row": 0.1})


def test_most_of_a_long_step_leaves_the_next_one_open() -> None:
    assert LatePlanning(COST).open_seconds(StepLoad(decodes=3)) == pytest.approx(MOST * 0.3)


def test_positions_that_may_be_left_empty_leave_nothing_open() -> None:
    costs = dict.fromkeys(COEFFICIENTS, 0.0) | {"decode_row": 0.1, "decode_context_token": 0.001}
    late = LatePlanning(CostModel.fixed({**costs, "extra_step": 5.0, "extra_position": 1.0}))
    plain = StepLoad(decodes=3, context=30)
    allowed = StepLoad(decodes=3, context=30 + 48 * 10, extra_positions=48)
    assert late.open_seconds(allowed) == pytest.approx(late.open_seconds(plain))


def test_the_lead_of_a_short_step_is_kept() -> None:
    late = LatePlanning(COST)
    assert late.open_part(0.020) == 0.020 - LEAD_SECONDS
    assert late.open_part(LEAD_SECONDS / 2) == 0.0


def test_no_step_stays_open_without_known_costs_or_late_planning() -> None:
    assert LatePlanning(CostModel()).open_seconds(StepLoad(decodes=1)) == 0.0
    assert LatePlanning(COST, most=0.0).open_seconds(StepLoad(decodes=1)) == 0.0


def test_a_step_that_came_too_late_makes_the_next_ones_come_earlier() -> None:
    late = LatePlanning(COST)
    for _ in range(8):
        late.learn(0.0)
    assert late.open_part(1.0) == late.share < MOST / 2
    for _ in range(500):
        late.learn(0.1)
    assert MOST - 0.001 < late.open_part(1.0) <= MOST


def test_a_step_that_was_planned_at_once_was_not_too_late() -> None:
    late = LatePlanning(COST)
    for _ in range(30):
        late.learn(0.0)
    low = late.open_part(1.0)
    late.learn(0.0, was_open=False)
    assert late.open_part(1.0) == low
    for _ in range(500):
        late.learn(0.1, was_open=False)
    assert late.open_part(1.0) > MOST - 0.001


VARIATIONS: dict[str, Callable[[random.Random], float]] = {
    "none": lambda _: 1.0,
    "a little": lambda rng: rng.uniform(0.9, 1.1),
    "much": lambda rng: rng.lognormvariate(0.0, 0.4),
    "now and then": lambda rng: 0.5 if rng.random() < 0.1 else 1.0,
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_few_steps_come_too_late_however_much_they_vary(name: str) -> None:
    late, rng, num_late = LatePlanning(COST), random.Random(1), 0
    for _ in range(2000):
        spare = VARIATIONS[name](rng) - late.open_part(1.0)
        num_late += spare <= 0.0
        late.learn(max(0.0, spare))
    assert num_late <= 0.08 * 2000
    assert late.open_part(1.0) > 0.2


@given(st.lists(st.floats(0.0, 1.0)), st.floats(0.0, 100.0))
def test_the_open_part_of_a_step_stays_within_its_bounds(
    spares: list[float], seconds: float
) -> None:
    late = LatePlanning(COST)
    for spare in spares:
        late.learn(spare)
    assert 0.0 <= late.open_part(seconds) <= max(0.0, min(MOST * seconds, seconds - LEAD_SECONDS))
