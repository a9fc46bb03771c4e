from __future__ import annotations

from random import Random
from statistics import mean, median

import pytest

from millrace.simulate.workload import Lengths


def drawn(text: str, count: int = 20_000) -> list[int]:
    random, lengths = Random(1), Lengths.parse(text)
    return [lengths.draw(random) for _ in range(count)]


def test_a_number_alone_is_always_that() -> None:
    assert set(drawn("512", 10)) == {512}


def test_uniform_takes_both_ends() -> None:
    values = drawn("uniform:3:6")
    assert set(values) == {3, 4, 5, 6}
    assert mean(values) == pytest.approx(4.5, rel=0.02)


def test_exponential_has_its_mean() -> None:
    # Whole tokens, cut off below: half a token less.
    assert mean(drawn("exponential:200")) == pytest.approx(199.5, rel=0.03)


def test_lognormal_has_its_median_and_spread() -> None:
    values = sorted(drawn("lognormal:300:1"))
    assert median(values) == pytest.approx(300, rel=0.03)
    # One standard deviation above the median, a factor of e, lie 15.87 %.
    assert sum(value > 300 * 2.71828 for value in values) / len(values) == pytest.approx(
        0.1587, 0.1
    )


def test_pareto_has_its_least_and_tail() -> None:
    values = drawn("pareto:100:2")
    assert min(values) == 100
    assert sum(value >= 200 for value in values) / len(values) == pytest.approx(0.25, rel=0.05)


def test_a_maximum_cuts_the_tail_and_no_length_is_below_one() -> None:
    assert max(drawn("pareto:100:0.1:5000")) == 5000
    assert min(drawn("exponential:0.2")) == 1
    assert max(drawn("pareto:100:0.01")) == 10**9


@pytest.mark.parametrize("text", ["512", "uniform:3:6", "lognormal:300:0.8:2000"])
def test_what_is_printed_can_be_read(text: str) -> None:
    lengths = Lengths.parse(text)
    assert Lengths.parse(str(lengths)) == lengths


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "-5", "nan", "inf", "normal:3:4", "uniform:6:3", "pareto:3", "fixed:1:2:3"],
)
def test_anything_else_is_refused_with_the_syntax(text: str) -> None:
    with pytest.raises(ValueError, match="is not a length: use 512, uniform:LEAST:MOST"):
        Lengths.parse(text)
