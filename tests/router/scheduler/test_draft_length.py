"""Draft lengths against every other choice, on machines on which draft tokens do or do not pay."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.prediction.cost import COEFFICIENTS, EXTRA_COEFFICIENTS, CostModel
from millrace_router.prediction.step_load import StepLoad
from millrace_router.request.schedulable import Acceptance
from millrace_router.scheduler.draft_length import (
    AdaptiveDraftLength,
    DraftPolicy,
    FixedDraftLength,
)

STEP, ROW, CONTEXT = 0.01, 0.0004, 1e-7
MOST = 4


def cost_model(*, once: float = 0.0, each: float = ROW, row: float = ROW) -> CostModel:
    values = (STEP, row, CONTEXT, 0.0, 6e-5, 1e-7, once, each)
    return CostModel.fixed(dict(zip(COEFFICIENTS + EXTRA_COEFFICIENTS, values, strict=True)))


def history(*rates: float, supply: float = 1.0) -> Acceptance:
    row = Acceptance()
    row.rates, row.supply = list(rates), supply
    return row


def load_of(rows: Sequence[tuple[Acceptance, int]]) -> StepLoad:
    return StepLoad(decodes=len(rows), context=sum(context for _, context in rows))


def rate_of(
    cost: CostModel, rows: Sequence[tuple[Acceptance, int]], lengths: Sequence[int]
) -> float:
    """Expected tokens per second, written out; every allowed draft token is made."""
    tokens, load = float(len(rows)), load_of(rows)
    for (row, context), length in zip(rows, lengths, strict=True):
        for count in range(1, length + 1):
            value = 1.0
            for rate in row.rates[:count]:
                value *= rate
            tokens += value
        load.extra_positions += length
        load.context += length * context
    seconds = cost.seconds(load)
    assert seconds is not None
    return tokens / seconds


@settings(deadline=None, max_examples=200)
@given(
    rows=st.lists(
        st.tuples(st.lists(st.floats(0, 1), min_size=3, max_size=3), st.integers(0, 20_000)),
        min_size=1,
        max_size=3,
    ),
    once=st.sampled_from([0.0, 0.001, 0.02]),
    each=st.floats(1e-5, 0.02),
)
def test_no_other_lengths_yield_more_tokens_per_second(
    rows: list[tuple[list[float], int]], once: float, each: float
) -> None:
    cost = cost_model(once=once, each=each)
    known = [(history(*rates), context) for rates, context in rows]
    # Without the credit that probes need.
    found = rate_of(
        cost, known, AdaptiveDraftLength(cost, max_draft_tokens=3).lengths(known, load_of(known))
    )
    best = max(rate_of(cost, known, ls) for ls in product(range(4), repeat=len(rows)))
    # Draft tokens that are worth hardly more than their cost are not made.
    assert found >= best / 1.05


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8, 0.95])
def test_lengths_follow_the_formula_for_one_rate(rate: float) -> None:
    """Leviathan et al. 2023, theorem 3.8: (1 - a^(k+1)) / (1 - a) tokens for the price of 1 + k c."""
    each = STEP / 10
    cost = cost_model(row=0.0, each=each)
    rows = [(history(*[rate] * 8), 0)]
    walltime = [(1 - rate ** (k + 1)) / (1 - rate) / (1 + k * each / STEP) for k in range(9)]
    (length,) = AdaptiveDraftLength(cost, max_draft_tokens=8).lengths(rows, load_of(rows))
    assert length == walltime.index(max(walltime))


def test_a_full_batch_gets_fewer_draft_tokens_than_one_row() -> None:
    lengths = []
    for count in (1, 32, 512):
        rows = [(history(0.6, 0.6, 0.6, 0.6), 100) for _ in range(count)]
        lengths.append(
            max(
                AdaptiveDraftLength(cost_model(), max_draft_tokens=MOST).lengths(
                    rows, load_of(rows)
                )
            )
        )
    assert lengths[0] == MOST
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] <= 1


def test_only_rows_with_high_acceptance_get_draft_tokens() -> None:
    rows = [(history(*[rate] * 4), 100) for rate in (0.99, 0.05) * 32]
    lengths = AdaptiveDraftLength(cost_model(), max_draft_tokens=MOST).lengths(rows, load_of(rows))
    assert set(lengths[::2]) == {MOST}
    assert set(lengths[1::2]) == {0}


def test_the_fixed_cost_of_a_wide_step_is_shared_by_all_rows() -> None:
    """The case occurs where only steps with one position a row replay a graph."""
    cost = cost_model(once=STEP)
    for num_good, drafts in ((1, False), (16, True)):
        rows = [(history(*[0.85 * (place < num_good)] * 4), 10) for place in range(16)]
        lengths = AdaptiveDraftLength(cost, max_draft_tokens=MOST).lengths(rows, load_of(rows))
        assert (lengths[0] > 1) is drafts, num_good


def test_there_are_no_draft_tokens_before_costs_are_known() -> None:
    rows = [(history(1.0, 1.0, 1.0, 1.0), 10)]
    assert AdaptiveDraftLength(CostModel(), max_draft_tokens=MOST).lengths(rows, load_of(rows)) == [
        0
    ]
    assert FixedDraftLength(MOST).lengths(rows, load_of(rows)) == [MOST]


def test_new_rows_begin_with_the_acceptance_of_others() -> None:
    policy = AdaptiveDraftLength(cost_model(), max_draft_tokens=MOST)
    old, new = Acceptance(), Acceptance()
    for _ in range(300):
        policy.observe(old, allowed=MOST, drafted=MOST, accepted=0)
    rows = [(new, 10)] * 32
    assert set(policy.lengths(rows, load_of(rows))) <= {0, 1}
    assert new.rates[0] < 0.05


def test_draft_tokens_after_a_rejected_one_do_not_count() -> None:
    policy, row = (
        AdaptiveDraftLength(cost_model(), max_draft_tokens=MOST),
        history(0.5, 0.5, 0.5, 0.5),
    )
    policy.observe(row, allowed=4, drafted=4, accepted=1)
    assert row.rates[0] > 0.5 > row.rates[1]
    assert row.rates[2:] == [0.5, 0.5]
    policy.observe(row, allowed=4, drafted=0, accepted=0)
    assert row.rates[2:] == [0.5, 0.5]
    assert row.supply < 1.0


def test_while_draft_tokens_have_cost_more_than_they_won_there_are_none() -> None:
    """Whatever is expected of them, and be they right; a fiftieth of the time pays it off."""
    cost = cost_model()
    policy = AdaptiveDraftLength(cost, max_draft_tokens=MOST)
    rows = [(history(1.0, 1.0, 1.0, 1.0), 10)]
    load = load_of(rows)
    assert policy.lengths(rows, load) == [MOST]
    seconds = cost.seconds(load) or 0.0
    extra = StepLoad(decodes=1, context=50, extra_positions=4)
    policy.step_took(extra, 3 * seconds, accepted=1)
    policy.step_took(extra, 3 * seconds, accepted=1)
    off = 0
    while policy.lengths(rows, load) == [0]:
        policy.step_took(load, seconds, accepted=0)
        off += 1
    assert off == pytest.approx(2 / 0.02, rel=0.1)
    policy.step_took(extra, 1000 * seconds, accepted=4)
    assert policy.lengths(rows, load) == [MOST], "another process delayed the step"


@dataclass(slots=True)
class Machine:
    """A batch on a virtual clock; what steps really cost need not be what the policy believes."""

    cost: CostModel
    policy: DraftPolicy | None
    is_right: Callable[[int, int], float]
    """Probability that a draft token of this row is accepted in this step."""
    supply: float = 1.0
    num_rows: int = 1
    learns: CostModel | None = None
    after: float = 0.0
    """Seconds that a step with draft tokens adds to the next one, in which they are verified."""
    had_drafts: bool = False
    seconds: float = 0.0
    tokens: int = 0
    random: random.Random = field(default_factory=lambda: random.Random(5))
    rows: list[Acceptance] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)

    def run(self, num_steps: int) -> float:
        """Tokens per second."""
        self.rows = [Acceptance() for _ in range(self.num_rows)]
        for number in range(num_steps):
            rows = [(row, 200 + number % 300) for row in self.rows]
            lengths = [0] * self.num_rows
            if self.policy is not None:
                lengths = list(self.policy.lengths(rows, load_of(rows)))
            self.lengths.append(lengths)
            self._step(number, rows, lengths)
        return self.tokens / self.seconds

    def _step(self, number: int, rows: list[tuple[Acceptance, int]], lengths: list[int]) -> None:
        load, num_right = load_of(rows), 0
        for index, ((row, context), length) in enumerate(zip(rows, lengths, strict=True)):
            drafted = length if self.random.random() < self.supply else 0
            accepted = 0
            while accepted < drafted and self.random.random() < self.is_right(index, number):
                accepted += 1
            self.tokens += 1 + accepted
            num_right += accepted
            load.extra_positions += drafted
            load.context += drafted * context
            if length and self.policy is not None:
                self.policy.observe(row, allowed=length, drafted=drafted, accepted=accepted)
        seconds = self.cost.seconds(load)
        assert seconds is not None
        seconds += self.after * self.had_drafts
        self.had_drafts = load.extra_positions > 0
        self.seconds += seconds
        if self.policy is not None:
            self.policy.step_took(load, seconds, accepted=num_right)
        if self.learns is not None:
            self.learns.observe(load, seconds)


@settings(deadline=None, max_examples=20)
@given(
    rate=st.floats(0, 1),
    supply=st.sampled_from([0.05, 0.5, 1.0]),
    num_rows=st.sampled_from([1, 8, 32]),
    once=st.sampled_from([0.0, 0.005, 0.02]),
    each=st.sampled_from([ROW, 4 * ROW, 10 * ROW]),
    after=st.sampled_from([0.0, 0.005, 0.02]),
)
def test_adaptive_drafts_reach_95_percent_of_plain_speed(
    rate: float, supply: float, num_rows: int, once: float, each: float, after: float
) -> None:
    """Whatever machine and text are like, and with a cost model that has to find that out."""
    true = cost_model(once=once, each=each)
    learns = CostModel()
    plain = Machine(true, None, lambda *_: rate, num_rows=num_rows, learns=learns).run(100)
    policy = AdaptiveDraftLength(learns, max_draft_tokens=MOST)
    machine = Machine(
        true,
        policy,
        lambda *_: rate,
        supply=supply,
        num_rows=num_rows,
        learns=learns,
        after=after,
    )
    assert machine.run(1000) >= 0.95 * plain


@pytest.mark.parametrize("after", [0.6 * STEP, 2 * STEP])
@pytest.mark.parametrize("supply", [0.3, 0.8])
@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_verification_in_the_next_step_is_a_cost_of_draft_tokens(
    rate: float, supply: float, after: float
) -> None:
    """If verification counted as a cost of plain steps, draft tokens would seem to cost nothing."""
    true, learns = cost_model(once=0.002), CostModel()
    plain = Machine(true, None, lambda *_: rate, learns=learns).run(100)
    policy = AdaptiveDraftLength(learns, max_draft_tokens=MOST)
    machine = Machine(true, policy, lambda *_: rate, supply, learns=learns, after=after)
    assert machine.run(1500) >= 0.95 * plain


@pytest.mark.parametrize("rate", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("num_rows", [1, 8, 32])
def test_adaptive_lengths_are_as_good_as_the_best_fixed_length(num_rows: int, rate: float) -> None:
    """Though the rate has to be learned, row by row."""
    cost = cost_model()
    policies: list[DraftPolicy] = [
        AdaptiveDraftLength(cost, max_draft_tokens=MOST),
        *(FixedDraftLength(length) for length in range(MOST + 1)),
    ]
    found, *fixed = [
        Machine(cost, policy, lambda *_: rate, num_rows=num_rows).run(400) for policy in policies
    ]
    assert found > 0.92 * max(fixed)
    assert max(fixed) > 1.3 * fixed[0] or rate < 0.9


def test_draft_tokens_return_when_repetition_begins() -> None:
    """Within some probes, though nothing was expected for hundreds of steps."""
    cost = cost_model()
    machine = Machine(
        cost,
        AdaptiveDraftLength(cost, max_draft_tokens=MOST),
        lambda _, step: float(step >= 500),
        num_rows=16,
    )
    machine.run(700)
    before = [sum(lengths) for lengths in machine.lengths[200:500]]
    assert sum(before) < 16 * 300 * 0.05
    assert machine.lengths[-1] == [MOST] * 16


def test_only_rows_that_repeat_themselves_get_draft_tokens() -> None:
    cost = cost_model()
    machine = Machine(
        cost,
        AdaptiveDraftLength(cost, max_draft_tokens=MOST),
        lambda row, _: float(row == 3),
        num_rows=32,
    )
    machine.run(400)
    late = machine.lengths[200:]
    assert sum(lengths[3] for lengths in late) > 3.9 * len(late)
    others = sum(sum(lengths) - lengths[3] for lengths in late)
    assert others < 0.1 * 31 * len(late)
