"""Rows of several positions, decision by decision; `test_scheduling.py` has them in any order among all others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat

import pytest

from millrace_proto import generate_pb2 as pb
from millrace_router.prediction.step_load import StepLoad
from millrace_router.request.entry import MAX_JUMP_FORWARD_TOKENS
from millrace_router.request.request import Grammar, GrammarKind, ValidRequest
from millrace_router.request.schedulable import Acceptance
from millrace_router.scheduler.step_plan import Budgets, Row, StepPlan
from millrace_router.shards.wire import plan_to_pb
from millrace_testing.schedules.driver import ScheduleDriver
from millrace_testing.shards.hash_choices import Choices
from millrace_testing.shards.hash_shard import HashShard

GRAMMAR = Grammar(GrammarKind.REGEX, ".*")


class Lengths:
    """The lengths given, one for each row and step; what was observed of them."""

    def __init__(self, lengths: Iterator[int]) -> None:
        self._lengths = lengths
        self.observed: list[tuple[int, int, int]] = []

    def lengths(self, rows: Sequence[tuple[Acceptance, int]], load: StepLoad) -> Sequence[int]:
        return [next(self._lengths) for _ in rows]

    def observe(self, row: Acceptance, *, allowed: int, drafted: int, accepted: int) -> None:
        self.observed.append((allowed, drafted, accepted))

    def step_took(self, load: StepLoad, seconds: float, *, accepted: int) -> None:
        pass


class Always(Choices):
    """As many draft tokens as allowed, all accepted or rejected; `forced` tokens, up to `filled` positions a step."""

    def __init__(self, *, right: bool = True, forced: int = 0, filled: int = 99) -> None:
        super().__init__(right=float(right))
        self.forced = forced
        self.filled = filled

    def num_draft_tokens(self, most: int) -> int:
        return most

    def chain_length(self) -> int:
        return self.forced

    def num_filled(self, most: int) -> int:
        return min(most, self.filled)


def new_driver(
    *,
    prefill: int = 64,
    rows: int = 4,
    num_blocks: int = 60,
    max_draft_tokens: int = 4,
    choices: Choices | None = None,
    lengths: Lengths | None = None,
    depth: int = 2,
    reserve_all: bool = False,
    prefix_caching: bool = False,
) -> ScheduleDriver:
    budgets = Budgets(
        max_batch_prefill_tokens=prefill,
        max_batch_size=rows,
        max_draft_tokens=max_draft_tokens,
        reserve_all=reserve_all,
    )
    shard = HashShard(
        num_blocks=num_blocks,
        block_size=4,
        max_batch_size=rows,
        max_draft_tokens=max_draft_tokens,
        choices=choices or Always(),
    )
    return ScheduleDriver(
        budgets, shard, prefix_caching=prefix_caching, depth=depth, drafts=lengths
    )


def submit(driver: ScheduleDriver, *lengths: tuple[int, int], guided: bool = False) -> None:
    """Requests of (prompt tokens, new tokens), each with its own prompt."""
    for prompt, new in lengths:
        first = len(driver.entries)
        driver.submit(
            ValidRequest(
                input_ids=(first,) * prompt,
                max_new_tokens=new,
                grammar=GRAMMAR if guided else None,
            )
        )


def sent(driver: ScheduleDriver) -> StepPlan:
    plan = driver.send()
    assert plan is not None
    return plan


def message(plan: StepPlan) -> pb.Decode:
    return plan_to_pb(plan, epoch=1, number=1).decode


def only_row(driver: ScheduleDriver) -> Row:
    (row,) = driver.planner.rows.values()
    return row


def finish(driver: ScheduleDriver) -> int:
    """Run to the end and check everything; how many steps it took in all."""
    while driver.turn():
        driver.check()
    driver.check_idle()
    return sum(plan.has_forward for plan in driver.plans)


def test_plain_rows_are_on_the_wire_as_ever() -> None:
    driver = new_driver(max_draft_tokens=0)
    submit(driver, (4, 6), (3, 6))
    sent(driver)
    plan = sent(driver)
    assert (plan.decode_tokens, plan.draft_tokens, plan.multi_token_slots) == ([], [], [])
    assert plan_to_pb(plan, epoch=1, number=1).decode == pb.Decode(
        decode_slots=plan.decodes,
        change=pb.BatchChange(
            grown_slots=[slot for slot, _ in plan.grown],
            grown_blocks=[block for _, block in plan.grown],
        ),
    )


def test_without_draft_tokens_in_a_step_there_is_no_column() -> None:
    driver = new_driver(lengths=Lengths(repeat(0)))
    submit(driver, (4, 6))
    sent(driver)
    plan = sent(driver)
    assert plan.decodes
    assert not message(plan).decode_tokens
    assert finish(driver) == 6


def test_columns_limit_the_positions_of_each_row() -> None:
    driver = new_driver(lengths=Lengths(chain([2, 0, 4], repeat(0))), prefill=80)
    submit(driver, (4, 20), (4, 20))
    submit(driver, (4, 40), guided=True)
    sent(driver)
    decode = message(sent(driver))
    assert list(decode.decode_tokens) == [3, 1, 1 + MAX_JUMP_FORWARD_TOKENS]
    assert list(decode.draft_tokens) == [2, 0, 4]
    finish(driver)


def test_without_speculation_there_is_no_column_of_draft_tokens() -> None:
    driver = new_driver(max_draft_tokens=0)
    submit(driver, (4, 40), guided=True)
    sent(driver)
    decode = message(sent(driver))
    assert (list(decode.decode_tokens), list(decode.draft_tokens)) == (
        [1 + MAX_JUMP_FORWARD_TOKENS],
        [],
    )


@pytest.mark.parametrize(("right", "steps"), [(True, 6), (False, 21)])
def test_accepted_draft_tokens_save_steps_and_rejected_ones_change_nothing(
    right: bool, steps: int
) -> None:
    driver = new_driver(choices=Always(right=right), depth=1)
    submit(driver, (4, 21))
    assert finish(driver) == steps
    plans = [plan.decode_tokens for plan in driver.plans if plan.decodes]
    assert plans[0] == [5]


def test_an_answer_lowers_the_bound_and_the_next_step_gets_the_room() -> None:
    driver = new_driver(choices=Always(right=False), lengths=Lengths(repeat(4)))
    submit(driver, (4, 30))
    sent(driver)
    sent(driver)
    row = only_row(driver)
    assert (row.num_computed, row.num_kv_tokens, row.num_tokens_planned) == (0, 9, 2)
    driver.receive()
    sent(driver)
    assert (row.num_computed, row.num_kv_tokens, row.num_tokens_planned) == (4, 14, 3)
    driver.receive()
    assert (row.num_computed, row.num_kv_tokens, row.num_tokens_planned) == (5, 10, 3)
    finish(driver)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("right", [True, False])
def test_no_position_beyond_the_last_token_is_ever_allowed(depth: int, right: bool) -> None:
    driver = new_driver(choices=Always(right=right), depth=depth, num_blocks=5, rows=1)
    submit(driver, (4, 13))
    finish(driver)
    assert driver.plans[-1].num_preempted == 0


def test_a_row_close_to_its_end_keeps_two_steps_in_flight() -> None:
    driver = new_driver(choices=Always(right=False))
    submit(driver, (4, 12))
    in_flight = []
    while driver.turn():
        in_flight.append(len(driver.flights))
    driver.check_idle()
    assert in_flight == [1] * 11 + [0, 0], "the last one only drops it"
    assert sum(plan.has_forward for plan in driver.plans) == 12


def test_forced_tokens_of_a_step_are_computed_in_the_next() -> None:
    """A prediction, then a chain of three and so on; a step more for each pair that is in flight."""
    driver = new_driver(max_draft_tokens=0, choices=Always(forced=3), depth=1)
    submit(driver, (4, 30), guided=True)
    assert finish(driver) == 10


@pytest.mark.parametrize("depth", [1, 2])
def test_forced_tokens_may_be_computed_one_by_one(depth: int) -> None:
    """Shards do so where more positions would delay other rows; the end comes as early as without forced tokens."""
    driver = new_driver(max_draft_tokens=0, choices=Always(forced=3, filled=1), depth=depth)
    submit(driver, (4, 30), guided=True)
    assert 28 <= finish(driver) <= 30 + depth - 1


def test_a_chain_longer_than_the_allowance_yields_nothing_until_it_is_computed() -> None:
    driver = new_driver(max_draft_tokens=0, choices=Always(forced=20), depth=1, num_blocks=30)
    submit(driver, (4, 60), guided=True)
    answers = []
    while driver.send() is not None:
        answers.append(driver.flights[0].answer)
        driver.receive()
        driver.check()
    driver.check_idle()
    counts = [sum(answer.counts) for answer in answers if answer.slots or answer.computed_slots]
    assert counts == [20, 0, 20, 0, 20]


def test_draft_tokens_after_forced_tokens_are_not_learned_from() -> None:
    lengths = Lengths(repeat(4))
    driver = new_driver(choices=Always(forced=3), lengths=lengths)
    submit(driver, (4, 30), guided=True)
    finish(driver)
    assert lengths.observed == []


def test_acceptance_of_draft_tokens_is_learned() -> None:
    lengths = Lengths(repeat(3))
    driver = new_driver(lengths=lengths, depth=1)
    submit(driver, (4, 9))
    finish(driver)
    assert lengths.observed == [(3, 3, 3), (2, 2, 2)]


def test_when_the_budget_is_tight_draft_tokens_go_first_and_no_row_is_left_out() -> None:
    """Of 26 positions, 4 are kept for a prompt, 2 are the rows' own, and 16 forced and 4 draft tokens take the rest."""
    driver = new_driver(prefill=26, lengths=Lengths(repeat(4)), choices=Always(forced=2))
    submit(driver, (4, 60))
    submit(driver, (4, 60), guided=True)
    sent(driver)
    plan = sent(driver)
    assert (plan.decode_tokens, plan.draft_tokens) == ([5, 1 + MAX_JUMP_FORWARD_TOKENS], [4, 4])
    for prefill, tokens in ((24, [3, 17]), (22, [1, 17]), (12, [1, 7]), (6, []), (1, [])):
        driver.planner.limit(
            Budgets(max_batch_prefill_tokens=prefill, max_batch_size=4, max_draft_tokens=4)
        )
        driver.budgets = driver.planner.budgets
        driver.receive()
        plan = sent(driver)
        assert len(plan.decodes) == 2
        assert plan.decode_tokens == tokens, prefill
        assert all(a < b for a, b in zip(plan.draft_tokens, plan.decode_tokens, strict=True))


def test_extra_positions_count_in_the_load_and_leave_less_for_prompts() -> None:
    driver = new_driver(prefill=16, lengths=Lengths(repeat(3)))
    submit(driver, (4, 30), (40, 2))
    first, second = sent(driver), sent(driver)
    assert first.load.prefill_tokens == 16
    assert (second.load.decodes, second.load.extra_positions) == (1, 3)
    assert second.load.context == 5 + 6 + 7 + 8
    assert second.load.prefill_tokens == 12
    finish(driver)


def test_costs_are_learned_from_the_load_that_was_computed() -> None:
    class Few(Always):
        def num_draft_tokens(self, most: int) -> int:
            return min(1, most)

    driver = new_driver(choices=Few(), lengths=Lengths(repeat(3)), depth=1)
    submit(driver, (4, 30))
    driver.turn()
    plan = sent(driver)
    answer = driver.flights[0].answer
    progress = driver.planner.computed(
        plan,
        counts=[(0, 2)],
        computed=[(0, answer.computed_positions[0], answer.drafted_tokens[0])],
    )
    assert progress is not None
    assert (progress.drafted, progress.accepted) == (1, 1)
    assert (plan.load.extra_positions, progress.load.extra_positions) == (3, 1)
    assert progress.load.context == round(plan.load.context / 2)


def test_draft_tokens_take_no_block_that_others_soon_need() -> None:
    """Two rows fill a block each, and the four that are left are kept for the next two steps."""
    driver = new_driver(num_blocks=1 + 6, lengths=Lengths(repeat(4)), choices=Always(right=False))
    submit(driver, (3, 20), (3, 20))
    sent(driver)
    plan = sent(driver)
    assert driver.planner.blocks.num_available == 4
    assert not plan.decode_tokens
    assert len(plan.decodes) == 2
    finish(driver)


def test_with_full_reservation_draft_tokens_find_their_blocks() -> None:
    driver = new_driver(num_blocks=1 + 6, reserve_all=True, rows=1, lengths=Lengths(repeat(4)))
    submit(driver, (4, 21))
    assert finish(driver) < 9
    assert sum(plan.num_preempted for plan in driver.plans) == 0


def test_only_blocks_of_accepted_draft_tokens_are_shared() -> None:
    driver = new_driver(prefix_caching=True, choices=Choices(3, right=0.5))
    driver.submit(ValidRequest(input_ids=(1,) * 6, max_new_tokens=30))
    finish(driver)
    generated = driver.entries[0].generated_ids
    driver.submit(ValidRequest(input_ids=(*(1,) * 6, *generated), max_new_tokens=3))
    finish(driver)
    # What was accepted with the last token may be missing, and the block with the last token is not full.
    assert driver.shard.num_hit >= 6 + 30 - 4 - 2 * 4


def test_a_row_with_tokens_in_flight_is_preempted_and_replayed_exactly() -> None:
    driver = new_driver(num_blocks=1 + 9, choices=Choices(1), prefix_caching=True)
    submit(driver, (4, 28), (4, 28))
    submit(driver, (4, 28), guided=True)
    finish(driver)
    assert sum(plan.num_preempted for plan in driver.plans) > 0


def answered(positions: int, *, slot: int = 0) -> None:
    driver = new_driver(lengths=Lengths(repeat(3)), depth=1)
    submit(driver, (4, 30))
    driver.turn()
    plan = sent(driver)
    driver.planner.computed(plan, counts=[(0, 1)], computed=[(slot, positions, 3)])


@pytest.mark.parametrize("positions", [0, 4, 9])
def test_positions_outside_the_allowance_are_an_error(positions: int) -> None:
    with pytest.raises(ValueError, match=f"filled {positions - 4} positions where 1 to 4"):
        answered(positions)


def test_a_row_missing_from_the_answer_is_an_error() -> None:
    with pytest.raises(ValueError, match="positions where 1 to 4"):
        answered(5, slot=7)


def test_a_failed_row_needs_no_positions() -> None:
    driver = new_driver(lengths=Lengths(repeat(3)), depth=1)
    submit(driver, (4, 30))
    driver.turn()
    plan = sent(driver)
    driver.planner.computed(plan, [0], counts=[], computed=[])
    assert only_row(driver).num_computed == 4
