"""Decodes of several positions yield the bits of single decodes, for all positions and proposers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace_proto.sampling import Sampling
from millrace_shard.arrays import Ints
from millrace_shard.batch import step_tokens
from millrace_shard.batch.step import Forward, StepResult
from millrace_shard.device import transfers
from millrace_shard.device.stopwatch import Stopwatch
from millrace_shard.errors import StepInvalid
from millrace_shard.kernels.base import Kernels
from millrace_shard.model_runner.launched_step import LaunchedStep
from millrace_shard.models.interface import CausalModel
from millrace_shard.speculation.loading import NgramProposer, Speculation, lookup
from millrace_testing.engines.engine_driver import PROMPT, Driver, forward
from millrace_testing.engines.fake_engine import greedy as fake_greedy
from millrace_testing.engines.fake_engine import logits_for
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.engines.multi_token import (
    FakeGrammars,
    Generation,
    PlannedProposer,
    Want,
    Yielded,
    any_of,
)
from millrace_testing.engines.steps import MAX_TOKENS, Stepper, beside, ints, tiny_llama
from millrace_testing.models.models import greedy, prompt_of, read_model, save_tiny

MOST = 5
NUM_TOKENS = 24
BLOCK_SIZE = 8
FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"do_sample": True, "seed": 5, "temperature": 0.9, "top_p": 0.9},
    "penalised": {
        "do_sample": True,
        "seed": 7,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
        "openai_frequency_penalty": 0.3,
    },
    "filtered": {
        "do_sample": True,
        "seed": 9,
        "top_k": 12,
        "typical_p": 0.9,
        "min_p": 0.01,
        "bias": ((3, 1.5),),
        "watermark": True,
    },
}
PROMPTS = [prompt_of(19), prompt_of(50, seed=1), prompt_of(3, seed=2), prompt_of(9, seed=3)]


@dataclass(frozen=True)
class Setup:
    """A model, and what each want yields by single decodes, alone."""

    model: CausalModel
    kernels: Kernels
    dtype: torch.dtype
    wants: dict[int, Want]
    truth: dict[int, Yielded]

    def stepper(self, **options: Any) -> Stepper:
        return Stepper(self.model, self.kernels, dtype=self.dtype, **options)

    def planned(self, *, error_rate: float = 0.3, grammars: FakeGrammars | None = None) -> Stepper:
        """A stepper whose proposer has the future tokens and makes random errors."""
        stepper = self.stepper(max_draft_tokens=MOST, grammars=grammars and grammars.as_manager())
        futures = {slot: [*want.prompt, *self.truth[slot].ids] for slot, want in self.wants.items()}
        stepper.use(PlannedProposer(futures, error_rate=error_rate))
        return stepper


@pytest.fixture(scope="module", params=["plain-float32", "cpu-float32", "cpu-bfloat16"])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    name, _, type_name = request.param.partition("-")
    dtype = getattr(torch, type_name)
    kernels = make_kernels(name, deterministic=True, block_size=BLOCK_SIZE)
    model = tiny_llama(tmp_path_factory.mktemp("llama"), kernels, dtype)
    fields = zip(PROMPTS, FIELDS.values(), strict=True)
    wants = {
        slot: Want(prompt, some, top_n_tokens=slot) for slot, (prompt, some) in enumerate(fields)
    }
    stepper = Stepper(model, kernels, dtype=dtype)
    truth = {
        slot: Generation(stepper, {slot: want}, NUM_TOKENS).yielded[slot]
        for slot, want in wants.items()
    }
    return Setup(model, kernels, dtype, wants, truth)


def random_allowances(seed: int, most: int = MOST) -> Callable[[int], tuple[int, int]]:
    """Some rows may have drafts, some may fill positions without drafts, some are plain."""
    random = np.random.default_rng(seed)
    return lambda _: (int(random.integers(1, most + 3)), int(random.integers(0, most + 1)))


def check_equal(found: Mapping[int, Yielded], truth: Mapping[int, Yielded]) -> None:
    for slot, yielded in found.items():
        assert yielded.ids == truth[slot].ids
        assert yielded.bits == truth[slot].bits
        assert yielded.tops == truth[slot].tops


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [1000, 7])
def test_drafts_change_no_bit(setup: Setup, depth: int, chunk: int) -> None:
    run = Generation(
        setup.planned(),
        setup.wants,
        NUM_TOKENS,
        allow=random_allowances(depth),
        chunk=chunk,
        depth=depth,
    )
    check_equal(run.yielded, setup.truth)
    assert 0 < run.accepted < run.drafted


@pytest.mark.parametrize("drafting", [0, 2])
def test_a_row_with_drafts_changes_nothing_for_plain_rows(setup: Setup, drafting: int) -> None:
    run = Generation(
        setup.planned(error_rate=0.5),
        setup.wants,
        NUM_TOKENS,
        allow=lambda slot: (1 + MOST, MOST) if slot == drafting else (1, 0),
        depth=2,
    )
    check_equal(run.yielded, setup.truth)
    assert all(
        bool(yielded.computed) == (slot == drafting) for slot, yielded in run.yielded.items()
    )


def test_accepted_drafts_save_steps(setup: Setup) -> None:
    run = Generation(
        setup.planned(error_rate=0.0), setup.wants, NUM_TOKENS, allow=lambda _: (1 + MOST, MOST)
    )
    check_equal(run.yielded, setup.truth)
    assert run.accepted == run.drafted
    assert run.steps == 1 + -(-(NUM_TOKENS - 1) // (1 + MOST))


def test_rejected_drafts_leave_one_token_a_step(setup: Setup) -> None:
    run = Generation(
        setup.planned(error_rate=1.0), setup.wants, NUM_TOKENS, allow=lambda _: (1 + MOST, MOST)
    )
    check_equal(run.yielded, setup.truth)
    assert run.accepted == 0 < run.drafted
    assert run.steps == NUM_TOKENS


def test_computed_positions_match_all_tokens_but_the_last(setup: Setup) -> None:
    slot = 1
    stepper = setup.planned()
    run = Generation(stepper, {slot: setup.wants[slot]}, 12, allow=lambda _: (4, 3))
    lengths = [len(PROMPTS[slot]) + n for n in range(1, 20)]
    assert set(run.yielded[slot].computed) <= set(lengths)
    assert run.yielded[slot].computed == sorted(set(run.yielded[slot].computed))


def test_drafts_are_limited_to_the_maximum_of_the_shard(setup: Setup) -> None:
    """However many are allowed."""
    run = Generation(
        setup.planned(error_rate=0.0), setup.wants, NUM_TOKENS, allow=lambda _: (2**32 - 1,) * 2
    )
    check_equal(run.yielded, setup.truth)
    assert run.steps == 1 + -(-(NUM_TOKENS - 1) // (1 + MOST))


@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_allowances_yield_the_same(setup: Setup, data: st.DataObject) -> None:
    slots = data.draw(st.sets(st.sampled_from(sorted(setup.wants)), min_size=1))
    allowances = st.tuples(st.integers(1, 9), st.integers(0, 9))
    run = Generation(
        setup.planned(error_rate=data.draw(st.sampled_from([0.0, 0.3, 1.0]))),
        {slot: setup.wants[slot] for slot in slots},
        NUM_TOKENS,
        allow=lambda _: data.draw(allowances),
        chunk=data.draw(st.sampled_from([4, 11, 1000])),
        depth=data.draw(st.sampled_from([1, 2])),
    )
    check_equal(run.yielded, setup.truth)


@pytest.mark.parametrize("fault", [1, -1])
def test_a_miscounted_draft_is_noticed(
    setup: Setup, fault: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = step_tokens.num_accepted

    def miscount(ids: Ints, expected: Ints, num_samples: Ints) -> Ints:
        right: Ints = np.clip(count(ids, expected, num_samples) + fault, 1, num_samples)
        return right

    monkeypatch.setattr(step_tokens, "num_accepted", miscount)
    run = Generation(setup.planned(), setup.wants, NUM_TOKENS, allow=lambda _: (1 + MOST, MOST))
    if fault > 0:
        with pytest.raises(AssertionError):
            check_equal(run.yielded, setup.truth)
    else:
        # To reject what is right costs time alone.
        check_equal(run.yielded, setup.truth)


def test_ngram_drafts_in_repeating_text_change_no_token(setup: Setup) -> None:
    loop = prompt_of(11, seed=4) * 3
    wants = {slot: Want(loop, fields) for slot, fields in enumerate(FIELDS.values())}
    plain = setup.stepper()
    truth = {
        slot: Generation(plain, {slot: want}, 34).yielded[slot] for slot, want in wants.items()
    }
    stepper = setup.stepper(speculation=Speculation(max_draft_tokens=MOST))
    run = Generation(stepper, wants, 34, allow=lambda _: (1 + MOST, MOST), chunk=7, depth=2)
    check_equal(run.yielded, truth)
    assert run.drafted > run.accepted


def test_ngram_drafts_are_right_where_a_model_repeats_itself(tmp_path: Path) -> None:
    """And the tokens are transformers' own."""
    reference = save_tiny(tmp_path, "llama", vocab_size=24)
    kernels = make_kernels("cpu", deterministic=True, block_size=BLOCK_SIZE)
    with torch.inference_mode():
        model = read_model(tmp_path, kernels)
    prompts = [[token % 24 for token in prompt_of(9, seed=seed)] for seed in range(4)]
    stepper = Stepper(
        model, kernels, dtype=torch.float32, speculation=Speculation(max_draft_tokens=MOST)
    )
    wants = {slot: Want(prompt) for slot, prompt in enumerate(prompts)}
    run = Generation(stepper, wants, 48, allow=lambda _: (1 + MOST, MOST), depth=2)
    for slot, prompt in enumerate(prompts):
        assert run.yielded[slot].ids == greedy(reference, prompt, 48)[0]
    assert 0 < run.accepted < run.drafted
    assert run.steps < 48


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        ([1, 2, 3], 4, []),
        ([7], 4, []),
        ([5, 9, 2, 5], 2, [9, 2]),
        ([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 2, [4, 9]),
        ([1, 2, 3, 4, 9, 2, 3, 5, 8, 2, 3], 2, [5, 8]),
        ([1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3], 1, [9]),
        ([6, 4, 4], 3, [4, 4, 4]),
        ([1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),
        ([3, 3], 2, [3, 3]),
    ],
)
def test_lookup_takes_the_latest_of_the_longest(
    tokens: list[int], most: int, expected: list[int]
) -> None:
    assert lookup(np.array(tokens, dtype=np.int32), most).tolist() == expected


@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40), most=st.integers(1, 6))
def test_lookup_agrees_with_a_search_by_hand(tokens: list[int], most: int) -> None:
    expected: list[int] = []
    for length in (1, 2, 3):
        suffix = tokens[-length:]
        starts = [i for i in range(len(tokens) - length) if tokens[i : i + length] == suffix]
        if len(suffix) == length and starts:
            whole = [*tokens]
            for place in range(starts[-1] + length, starts[-1] + length + most):
                whole.append(whole[place])
            expected = whole[len(tokens) :]
    assert lookup(np.array(tokens, dtype=np.int32), most).tolist() == expected


def test_a_sequence_ends_at_its_last_position_for_any_allowance(setup: Setup) -> None:
    stepper = setup.planned(error_rate=0.0)
    stepper.run(stepper.admission(0, prompt_of(MAX_TOKENS - 5, seed=9)))
    stepper.use(PlannedProposer({0: [1] * 200}, error_rate=0.0))
    multi_token = Forward(decode_slots=ints([0]), decode_tokens=ints([6]), draft_tokens=ints([5]))
    positions, total = [], 1
    for _ in range(8):
        result = stepper.run(multi_token)
        positions += result.computed_positions.tolist()
        total += int(result.counts.sum())
    assert positions[-1] == MAX_TOKENS
    assert total == 6, "one token past the last position is sampled, and nothing after it"
    assert not len(stepper.run(multi_token).ids)
    assert not len(stepper.decode([0]).ids), "a plain decode finds no position either"


def test_allowances_are_cut_to_the_block_table(setup: Setup) -> None:
    stepper = setup.planned(error_rate=0.0)
    stepper.run(stepper.admission(0, setup.wants[0].prompt))
    room = len(stepper.batch.blocks.of(0)) * stepper.block_size
    multi_token = Forward(decode_slots=ints([0]), decode_tokens=ints([6]), draft_tokens=ints([5]))
    while (computed := int(stepper.run(multi_token).computed_positions[0])) < room:
        assert computed <= room
    with pytest.raises(StepInvalid, match="block table is too short"):
        stepper.run(multi_token)


@pytest.mark.parametrize(
    "fields",
    [
        {"decode_tokens": ints([1, 2])},
        {"decode_tokens": ints([0])},
        {"draft_tokens": ints([1, 1])},
        {"decode_tokens": ints([2]), "draft_tokens": ints([-1])},
    ],
    ids=["positions", "none", "drafts", "negative"],
)
def test_allowances_that_make_no_sense_are_refused(setup: Setup, fields: dict[str, Any]) -> None:
    stepper = setup.stepper()
    stepper.run(stepper.admission(0, PROMPTS[0]))
    with pytest.raises(StepInvalid, match=r"differ in length|at least one position"):
        stepper.run(Forward(decode_slots=ints([0]), **fields))


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("allowed", [4, 2, 1])
def test_forced_tokens_are_emitted_at_once_and_computed_as_allowed(
    setup: Setup, allowed: int, drafts: int
) -> None:
    """The oracle is a sequence whose prompt has the forced tokens."""
    grammars = FakeGrammars(setup.model.info.vocab_size)
    forced = [11, 4, 4, 150, 7, 11, 23]
    grammar = any_of(None, None, None, *([token] for token in forced), None)
    free, fields = setup.truth[1], FIELDS["seeded"]
    stepper = setup.planned(error_rate=0.2, grammars=grammars)
    want = Want(PROMPTS[1], fields, top_n_tokens=1, grammar=grammar)
    multi_token = (allowed, min(drafts, allowed - 1))
    yielded = Generation(stepper, {1: want}, 16, allow=lambda _: multi_token, depth=2).yielded[1]
    assert yielded.ids[:3] == free.ids[:3]
    assert yielded.ids[3:10] == forced
    assert yielded.bits[3:10] == [0] * 7, "log probability 0.0"
    assert yielded.tops[3:10] == [[(token, 0)] for token in forced]
    # After an accepted draft token a forced token is sampled, with the same result.
    assert len(forced) - drafts <= grammars.num_forced <= len(forced)
    oracle = Want([*PROMPTS[1], *yielded.ids[:10]], fields, top_n_tokens=1)
    rest = Generation(setup.stepper(), {1: oracle}, 6).yielded[1]
    assert (yielded.ids[10:], yielded.bits[10:], yielded.tops[10:]) == (
        rest.ids,
        rest.bits,
        rest.tops,
    )


def test_pending_tokens_beyond_the_allowance_yield_nothing_yet(setup: Setup) -> None:
    grammars = FakeGrammars(setup.model.info.vocab_size)
    stepper = setup.stepper(grammars=grammars.as_manager(), max_draft_tokens=MOST)
    grammar = any_of(None, [5], [6], [7], [8], [9], None)
    length = len(PROMPTS[0])
    step = stepper.admission(0, PROMPTS[0], grammar=grammar)
    assert stepper.run(step).counts.tolist() == [1]

    def decode(positions: int) -> tuple[list[int], list[int]]:
        result = stepper.run(Forward(decode_slots=ints([0]), decode_tokens=ints([positions])))
        return result.ids.tolist(), result.computed_positions.tolist()

    assert decode(5) == ([5, 6, 7, 8, 9], [length + 1])
    assert decode(2) == ([], [length + 3])
    assert decode(1) == ([], [])
    ids, computed = decode(2)
    assert (len(ids), computed) == (1, [length + 6])


def test_a_few_forced_tokens_wait_where_they_would_delay_seven_rows(setup: Setup) -> None:
    """Two forced tokens wait for a step with room, three are worth a tile of rows; later tokens are the same."""
    wants = {slot: Want(prompt_of(5, seed=slot), FIELDS["seeded"]) for slot in range(1, 8)}
    guided = Want(PROMPTS[0], FIELDS["seeded"])
    grammar = any_of(None, [5], [6], None, [7], [8], [9], None)

    def steps(row_tile: int) -> list[tuple[list[int], list[int]]]:
        """The guided tokens of each step, and the KV positions filled after it."""
        grammars = FakeGrammars(setup.model.info.vocab_size)
        stepper = setup.stepper(grammars=grammars.as_manager(), row_tile=row_tile)
        step = stepper.admission(0, guided.prompt, grammar=grammar, **guided.fields)
        found = [(stepper.run(step).ids.tolist(), [len(guided.prompt)])]
        for slot, want in wants.items():
            stepper.run(stepper.admission(slot, want.prompt, **want.fields))
        decode = Forward(decode_slots=ints(range(8)), decode_tokens=ints([6] + [1] * 7))
        for _ in range(7):
            result = stepper.run(decode)
            mine = int(result.counts[result.slots == 0].sum())
            found.append((result.ids.tolist()[:mine], result.computed_positions.tolist()))
        return found

    at_once, waiting = steps(1), steps(4)
    length = len(guided.prompt)
    assert [len(ids) for ids, _ in at_once] == [1, 2, 1, 3, 1, 1, 1, 1]
    assert [len(ids) for ids, _ in waiting] == [1, 2, 0, 1, 3, 1, 1, 1]
    assert [computed for _, computed in waiting[1:6]] == [[length + n] for n in (1, 2, 3, 4, 7)]
    tokens = [[id_ for ids, _ in run for id_ in ids] for run in (at_once, waiting)]
    assert tokens[1] == tokens[0][: len(tokens[1])]


def test_masks_hold_at_every_draft_position(setup: Setup) -> None:
    """Drafts that a grammar forbids are rejected; positions after accepted drafts have the masks of single decodes."""
    allowed = [None if place % 3 else list(range(20, 60)) for place in range(NUM_TOKENS)]
    grammar = any_of(*allowed)
    wants = {
        slot: Want(want.prompt, want.fields, want.top_n_tokens, grammar)
        for slot, want in setup.wants.items()
    }

    def guided() -> FakeGrammars:
        return FakeGrammars(setup.model.info.vocab_size)

    plain = setup.stepper(grammars=guided().as_manager())
    truth = {
        slot: Generation(plain, {slot: want}, NUM_TOKENS).yielded[slot]
        for slot, want in wants.items()
    }
    assert all(20 <= token < 60 for yielded in truth.values() for token in yielded.ids[::3])
    futures = {slot: [*want.prompt, *truth[slot].ids] for slot, want in wants.items()}
    stepper = setup.stepper(max_draft_tokens=MOST, grammars=guided().as_manager())
    stepper.use(PlannedProposer(futures))
    run = Generation(stepper, wants, NUM_TOKENS, allow=lambda _: (1 + MOST, MOST), depth=2)
    check_equal(run.yielded, truth)
    assert 0 < run.accepted < run.drafted


def test_a_grammar_without_a_manager_fails_only_its_sequence(setup: Setup) -> None:
    stepper = setup.stepper()
    stepper.run(stepper.admission(0, PROMPTS[0]))
    result = stepper.run(beside(stepper.admission(1, PROMPTS[1], grammar=any_of(None)), [0]))
    assert result.failed_slots.tolist() == [1]
    assert result.slots.tolist() == [0]


def test_a_matcher_that_cannot_continue_fails_only_its_sequence(setup: Setup) -> None:
    grammars = FakeGrammars(setup.model.info.vocab_size)
    stepper = setup.stepper(grammars=grammars.as_manager())
    for slot in (0, 1):
        stepper.run(stepper.admission(slot, PROMPTS[slot], grammar=any_of(None, None)))
    grammars._allowed[1] = [[], []]
    result = stepper.run(Forward(decode_slots=ints([0, 1])))
    assert result.failed_slots.tolist() == [1]
    assert result.slots.tolist() == [0]
    assert stepper.decode([1, 0]).failed_slots.tolist() == [1]


def test_a_matcher_gives_the_reason_for_its_failure(setup: Setup) -> None:
    grammars = FakeGrammars(setup.model.info.vocab_size)
    stepper = setup.stepper(grammars=grammars.as_manager())
    steps = [
        stepper.admission(slot, PROMPTS[slot], grammar=any_of(None, None, None)) for slot in (0, 1)
    ]
    _, first = (int(stepper.run(step).ids[0]) for step in steps)
    grammars._allowed[1] = [[first + 1], None, None]
    result = stepper.decode([0, 1])
    assert result.failed_slots.tolist() == [1]
    assert result.failure_reasons == {1: "no place"}
    assert stepper.decode([0]).failure_reasons == {}


@pytest.mark.parametrize("layer_value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_fails_with_all_its_drafts(
    setup: Setup, layer_value: float
) -> None:
    stepper = setup.planned(error_rate=0.0)
    for slot in (0, 1, 2):
        want = setup.wants[slot]
        stepper.run(stepper.admission(slot, want.prompt, **want.fields))
    for layer in stepper.cache:
        layer.values[int(stepper.batch.blocks.of(1)[0])] = layer_value
    multi_token = Forward(
        decode_slots=ints([0, 1, 2]), decode_tokens=ints([4] * 3), draft_tokens=ints([3] * 3)
    )
    result = stepper.run(multi_token)
    assert result.failed_slots.tolist() == [1]
    assert result.slots.tolist() == [0, 2]
    assert result.counts.tolist() == [4, 4]
    assert result.ids.tolist() == setup.truth[0].ids[1:5] + setup.truth[2].ids[1:5]
    again = stepper.run(multi_token)
    assert again.failed_slots.tolist() == [1]
    assert again.slots.tolist() == [0, 2]


def test_a_reused_slot_ignores_earlier_drafts(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, the step with drafts may still run when its sequence is dropped."""
    monkeypatch.setattr(Stopwatch, "is_done", lambda _: False)
    stepper = setup.planned(error_rate=0.0)
    stepper.run(stepper.admission(0, setup.wants[0].prompt))
    multi_token = Forward(decode_slots=ints([0]), decode_tokens=ints([4]), draft_tokens=ints([3]))
    with torch.inference_mode():
        flying = stepper.runner.launch(multi_token)
        again = stepper.admission(0, setup.wants[0].prompt)
        change = replace(again.change, dropped_slots=ints([0]))
        first = stepper.runner.launch(replace(again, change=change))
        second = stepper.runner.launch(multi_token)
        results = [launched.finish() for launched in (flying, first, second)]
    truth = setup.truth[0].ids
    assert [r.ids.tolist() for r in results] == [truth[1:5], truth[:1], truth[1:5]]


def test_steps_without_drafts_repeat_the_previous_one_for_rows_that_may_draft(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepper = setup.stepper(speculation=Speculation(max_draft_tokens=MOST))
    slots = (0, 1)
    results = [stepper.run(stepper.admission(slot, PROMPTS[slot])) for slot in slots]
    drafted = Forward(
        decode_slots=ints(slots), decode_tokens=ints([4, 4]), draft_tokens=ints([3, 3])
    )
    results += [stepper.decode(slots), stepper.run(drafted)]

    def lay_out(*_: object) -> None:
        raise AssertionError("a step was laid out anew")

    with monkeypatch.context() as context:
        context.setattr(stepper.batch.sequences, "lay_out", lay_out)
        results += [stepper.decode(slots) for _ in range(3)]
    results += [stepper.run(drafted), stepper.decode(slots)]
    found: dict[int, list[int]] = {slot: [] for slot in slots}
    for result in results:
        ids = result.ids.tolist()
        for slot, count in zip(result.slots.tolist(), result.counts.tolist(), strict=True):
            found[slot] += ids[:count]
            ids = ids[count:]
    for slot in slots:
        alone = Generation(setup.stepper(), {slot: Want(PROMPTS[slot])}, len(found[slot]))
        assert found[slot] == alone.yielded[slot].ids


def test_steps_that_find_no_drafts_repeat_from_the_first_on(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NgramProposer, "has_drafts", lambda *_: False)
    stepper = setup.stepper(speculation=Speculation(max_draft_tokens=MOST))
    results = [stepper.run(stepper.admission(0, PROMPTS[0]))]
    drafted = Forward(decode_slots=ints([0]), decode_tokens=ints([4]), draft_tokens=ints([3]))
    results.append(stepper.run(drafted))

    def lay_out(*_: object) -> None:
        raise AssertionError("a step was laid out anew")

    monkeypatch.setattr(stepper.batch.sequences, "lay_out", lay_out)
    results += [stepper.run(drafted) for _ in range(3)]
    found = [id_ for result in results for id_ in result.ids.tolist()]
    assert found == Generation(setup.stepper(), {0: Want(PROMPTS[0])}, 5).yielded[0].ids


class Waits:
    """Counts how often a launch reads tokens of earlier steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num = 0
        monkeypatch.setattr(Stopwatch, "is_done", lambda _: False)
        monkeypatch.setattr(Stopwatch, "wait", self._wait)

    def _wait(self) -> None:
        self.num += 1


@pytest.mark.parametrize("is_on_host", [True, False], ids=["tokens on the host", "on a device"])
def test_only_rows_that_depend_on_drafts_wait(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, *, is_on_host: bool
) -> None:
    with monkeypatch.context() as context:
        context.setattr(transfers, "is_synchronous", lambda _: is_on_host)
        stepper = setup.stepper(speculation=Speculation(max_draft_tokens=MOST))
    for slot in (0, 1):
        stepper.run(stepper.admission(slot, PROMPTS[slot]))
    waits = Waits(monkeypatch)

    def launch(step: Forward) -> LaunchedStep:
        with torch.inference_mode():
            return stepper.runner.launch(step)

    launch(Forward(decode_slots=ints([0, 1])))
    launch(Forward(decode_slots=ints([1, 0])))
    launch(Forward(decode_slots=ints([0]), decode_tokens=ints([3]), draft_tokens=ints([0])))
    assert waits.num == 0, "plain rows read their tokens from the device"
    launch(Forward(decode_slots=ints([0]), decode_tokens=ints([3]), draft_tokens=ints([2])))
    assert (waits.num == 0) is is_on_host, "n-grams are looked up on the host"
    before = waits.num
    launch(Forward(decode_slots=ints([1])))
    assert waits.num == before, "another row does not mind"
    launch(Forward(decode_slots=ints([0])))
    assert waits.num == before + 1, "the number of accepted drafts is known only there"


LOOP = [5, 9, 2, 5, 9, 2, 5]
OTHER = [44, 17, 3, 60]
FEW = (2, 5, 9)
BIASED = Sampling(bias=tuple((id_, 100.0) for id_ in FEW))
"""Few tokens make the text repeat, so n-grams have drafts."""


def among_few(ids: list[int], count: int) -> list[int]:
    """The tokens that the model yields after `ids` if only `FEW` are allowed."""
    sequence = list(ids)
    for _ in range(count):
        logits = logits_for(sequence)
        sequence.append(max(FEW, key=lambda id_: float(logits[id_])))
    return sequence[len(ids) :]


@pytest.fixture(params=[False, True], ids=["inline", "overlap"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    driver = Driver(overlap=request.param, speculation=Speculation(max_draft_tokens=3))
    driver.warm_up()
    driver.open()
    yield driver
    driver.engine.close()


def multi_token(*slots: int, positions: int = 4, drafts: int = 3) -> Forward:
    return Forward(
        decode_slots=ints(slots),
        decode_tokens=ints([positions] * len(slots)),
        draft_tokens=ints([drafts] * len(slots)),
    )


def test_rejected_drafts_are_forgotten(driver: Driver) -> None:
    """The KV they left behind is written over, and their tokens are not part of what follows."""
    driver.run(forward(driver.admit(0, LOOP, room=24, parameters=BIASED), chunks=[(0, len(LOOP))]))
    found, drafted = [], 0
    for _ in range(6):
        result = driver.run(multi_token(0))
        found += result.ids.tolist()
        drafted += int(result.drafted_tokens.sum())
        assert result.computed_positions.tolist() == [len(LOOP) + len(found)]
    assert found == among_few(LOOP, 1 + len(found))[1:]
    assert drafted > len(found) - 6 > 0


def test_steps_with_drafts_are_sent_ahead(driver: Driver) -> None:
    admitted = driver.admit(0, LOOP, room=24, parameters=BIASED), driver.admit(3, room=24)
    steps = [driver.send(forward(*admitted, chunks=[(0, len(LOOP)), (3, len(PROMPT))]))]
    steps += [driver.send(multi_token(0, 3)) for _ in range(4)]
    result: dict[int, list[int]] = {0: [], 3: []}
    for step in steps:
        outcome = step.result(30).outcome
        assert isinstance(outcome, StepResult)
        ids = iter(outcome.ids.tolist())
        for slot, count in zip(outcome.slots.tolist(), outcome.counts.tolist(), strict=True):
            result[slot] += [next(ids) for _ in range(count)]
    assert result[0] == among_few(LOOP, len(result[0]))
    assert result[3] == fake_greedy(PROMPT, len(result[3]))


def test_a_draft_that_is_not_finite_fails_only_its_row(driver: Driver) -> None:
    first = driver.run(
        forward(
            driver.admit(0, LOOP, room=24, parameters=BIASED),
            driver.admit(1, OTHER, room=24),
            chunks=[(0, len(LOOP)), (1, len(OTHER))],
        )
    )
    driver.model.poison = int(first.ids[0])
    result = driver.run(multi_token(0, 1))
    assert result.failed_slots.tolist() == [0]
    assert result.slots.tolist() == [1]
    driver.model.poison = None
    again = driver.run(multi_token(0, 1))
    assert again.failed_slots.tolist() == [0]
    assert again.slots.tolist() == [1]


def test_a_failed_step_leaves_nothing_of_its_drafts(driver: Driver) -> None:
    driver.run(forward(driver.admit(0, LOOP, room=24, parameters=BIASED), chunks=[(0, len(LOOP))]))

    def explode(_: object) -> None:
        raise ValueError("boom")

    driver.model.before_forward = explode
    driver.fail(multi_token(0))
    driver.model.before_forward = lambda _: None
    driver.open()
    driver.free = list(range(1, 64))
    ids = driver.run(
        forward(driver.admit(0, PROMPT, room=24), chunks=[(0, len(PROMPT))])
    ).ids.tolist()
    for _ in range(3):
        ids += driver.run(multi_token(0)).ids.tolist()
    assert ids == fake_greedy(PROMPT, len(ids))


def test_ranks_answer_with_one_checksum_for_one_outcome(driver: Driver) -> None:
    checksums = []
    for _ in range(2):
        driver.open()
        driver.free = list(range(1, 64))
        driver.run(
            forward(driver.admit(0, LOOP, room=24, parameters=BIASED), chunks=[(0, len(LOOP))])
        )
        checksums.append([driver.run(multi_token(0)).checksum for _ in range(3)])
    assert checksums[0] == checksums[1]
    assert len(set(checksums[0])) > 1
