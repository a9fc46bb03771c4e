"""Cases: their figures from known timelines, their prompts, the room they ask for."""

from __future__ import annotations

import math

import pytest
from bench.comparison.cases import BATCH, CASES, Case, Figure, limits_for, ragged, warm_up
from bench.comparison.roofline import Machine
from bench.harness.checkpoints import SHAPES, build_tokenizer

from millrace.load.levels import closed
from millrace.load.measurement import Timeline

TIMELINES = [Timeline(1.0, [1.5, 1.6, 1.8]), Timeline(1.0, [1.7, 1.9, 2.0])]


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        (Figure.PER_TOKEN, 1000 * (0.1 + 0.2 + 0.2 + 0.1) / 4),
        (Figure.FIRST_TOKEN, 600.0),
        (Figure.RATE, 6.0),
        # Both decode from 1.7 to 1.8, in which the first one gets a token.
        (Figure.DECODE_RATE, 10.0),
    ],
)
def test_figures_of_known_timelines(figure: Figure, value: float) -> None:
    case = Case("x", figure, ((4, 3), (4, 3)))
    assert case.value(TIMELINES) == pytest.approx(value)


def test_streams_that_never_run_together_have_no_joint_rate() -> None:
    apart = [Timeline(1.0, [1.1, 1.2]), Timeline(1.0, [1.3, 1.4])]
    with pytest.raises(ValueError, match="never ran together"):
        Case("x", Figure.DECODE_RATE, ((4, 2), (4, 2))).value(apart)


def test_prompts_are_those_of_the_load_level_of_the_same_name() -> None:
    tokenizer = build_tokenizer(18_600)
    level = closed(32, 128, 128, rounds=1)
    assert level.name == BATCH.name
    texts = [tokenizer.decode(r.ids).strip() for r in BATCH.requests(tokenizer)]
    assert texts == list(level.prompts())
    assert all(len(request.ids) == 128 for request in BATCH.requests(tokenizer))


def test_ragged_lengths_are_uneven_and_always_the_same() -> None:
    lengths = ragged()
    assert lengths == ragged()
    assert len(lengths) == 64
    assert all(16 <= prompt <= 512 and 16 <= new <= 256 for prompt, new in lengths)
    assert len(set(lengths)) > 60


def test_there_is_room_for_what_runs_at_once() -> None:
    cases = [
        Case("a", Figure.RATE, ((10, 5), (20, 5), (30, 5)), concurrency=2),
        Case("b", Figure.RATE, ((100, 1),)),
    ]
    assert cases[0].kv_tokens == 25 + 35
    limits = limits_for(cases, threads=2)
    assert limits.max_tokens > 100 + 4
    assert limits.kv_tokens >= warm_up(cases).kv_tokens > 104
    assert limits.max_streams == 2


@pytest.mark.parametrize("name", CASES)
def test_every_case_has_a_floor_that_gets_better_with_the_machine(name: str) -> None:
    slow = Machine(read_one=1e9, read_all=2e9, multiply=1e11, threads=2)
    fast = Machine(read_one=2e9, read_all=4e9, multiply=2e11, threads=2)
    for case in CASES[name]:
        before, after = case.floor(SHAPES[name], slow), case.floor(SHAPES[name], fast)
        assert math.isfinite(before)
        assert after / before == pytest.approx(2.0 if case.figure.more_is_better else 0.5)
