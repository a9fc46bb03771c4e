"""Each experiment makes the same requests each time, draws its chart, and says what follows from its table."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from bench.harness.quiet import Quiet
from bench.harness.repeats import Repeated, Sample
from bench.parts.client import Request
from bench.parts.fixture import Fixture
from bench.parts.outcome import Outcome
from bench.parts.part import Case, Figures, Table
from bench.parts.texts import Texts
from bench.policies import latency, load, variance
from bench.policies.__main__ import PARTS, parse_arguments
from bench.policies.experiment import CONTINUOUS, NAIVE, STATIC, Experiment, requests

SVG = "{http://www.w3.org/2000/svg}"


def fixture(texts: Texts, *, most_positions: int = 8192) -> Fixture:
    return Fixture(
        model=Path("model"),
        texts=texts,
        most_positions=most_positions,
        quick=False,
        quiet=Quiet(),
        out=Path("out"),
    )


def row(figures: Figures) -> dict[str, Repeated]:
    return {title: Repeated((Sample(value, 0.0),)) for title, value in figures.items()}


def dashes(chart: str) -> list[bool]:
    """Whether each line of a chart is dashed."""
    return [
        "stroke-dasharray" in line.attrib for line in ET.fromstring(chart).iter(f"{SVG}polyline")
    ]


def test_cases_share_servers_and_those_without_figures_have_no_row(texts: Texts) -> None:
    def run(where: Fixture) -> Iterator[tuple[str, Figures]]:
        for name in "ab":
            where.other_cores = 0.5 if name == "b" else 0.0
            yield name, {"x": float(where.repeat)}

    experiment = Experiment(
        name="e", title="E", method="How.", cases=tuple(map(Case, "abc")), run=run, hidden=("y",)
    )
    found = experiment.measure(fixture(texts), repeats=3)
    assert list(found) == ["a", "b"]
    assert [sample.value for sample in found["a"]["x"].samples] == [0.0, 1.0, 2.0]
    assert (found["a"]["x"].is_clean, found["b"]["x"].is_clean) == (True, False)
    text = experiment.text({"a": row({"x": 1.0, "y": 2.0})})
    assert [cell.strip() for cell in text.splitlines()[2].split("|")[1:-1]] == ["", "x"]


def test_requests_are_in_one_piece_and_all_prompts_differ(texts: Texts) -> None:
    asked = requests(fixture(texts), [8] * 20, [5] * 20, seed="a")
    assert not any(one.streams for one in asked)
    assert len({one.prompt for one in asked}) == 20
    assert {one.body()["parameters"]["max_new_tokens"] for one in asked} == {5}
    assert requests(fixture(texts), [8] * 20, [5] * 20, seed="a") == asked


def test_each_cap_cuts_the_same_lengths_and_variance_grows_with_it(texts: Texts) -> None:
    drawn = {cap: variance.lengths(fixture(texts), cap) for cap in variance.CAPS}
    assert drawn == {cap: variance.lengths(fixture(texts), cap) for cap in variance.CAPS}
    assert drawn[32] == [min(length, 32) for length in drawn[1536]]
    spreads = [statistics.pvariance(lengths) for lengths in drawn.values()]
    assert spreads == sorted(spreads)
    assert max(variance.lengths(fixture(texts, most_positions=512), 1536)) <= 512 * 3 // 4 - 32


def variance_table(rates: Figures, *, simulated: float = 1.0) -> Table:
    """The same rates at each cap; `transformers` is not simulated."""
    return {
        variance.case_name(cap, policy): row(
            {
                "tokens/s": rate,
                **(
                    {}
                    if policy == "transformers"
                    else {
                        "simulated tokens/s": simulated * rate,
                        "tokens/s: ratio": simulated,
                        "tokens/s: ratio in hindsight": 1.0,
                    }
                ),
            }
        )
        for cap in variance.CAPS
        for policy, rate in rates.items()
    }


RATES = {"continuous": 900.0, "static": 600.0, "static-naive": 200.0, "none": 90.0}


@pytest.mark.parametrize(("naive", "verdict"), [(200.0, "4.50, met"), (250.0, "3.60, missed")])
def test_variance_concludes_with_ratios_and_the_goal(naive: float, verdict: str) -> None:
    table = variance_table({**RATES, "static-naive": naive, "transformers": 300.0})
    *lines, goal, simulator = variance.conclude(table)
    assert len(lines) == len(variance.CAPS)
    assert "1.50 times static" in lines[0]
    assert "3.00 times transformers" in lines[-1]
    assert verdict in goal
    assert "within 20 %" in simulator


def test_variance_does_without_transformers_and_names_what_is_simulated_badly() -> None:
    lines = variance.conclude(variance_table(RATES, simulated=0.7))
    assert not any("transformers" in line for line in lines)
    assert "at most 32, static, tokens/s: 0.70 (1.00 in hindsight)" in lines[-1]


def test_variance_draws_predictions_of_all_but_transformers() -> None:
    chart = variance.chart("t", variance_table({**RATES, "transformers": 300.0}))
    assert dashes(chart) == [False] * 5 + [True] * 4


def outcomes(*seconds: float) -> list[Outcome]:
    request = Request(prompt="", prompt_tokens=1, output_tokens=10)
    return [Outcome(request, each) for each in seconds]


def test_percentiles_of_latency_are_interpolated() -> None:
    found = latency.percentiles(outcomes(3.0, 1.0, 2.0))
    assert (found["p50, s"], found["p100, s"]) == (2.0, 3.0)
    assert found["p10, s"] == pytest.approx(1.2)


def latency_table(continuous: Sequence[float], others: Sequence[float]) -> Table:
    both = dict.fromkeys(latency.CONTENDERS, others) | {CONTINUOUS: continuous}
    return {
        latency.case_name(share, policy): row(
            {
                prefix + title: value
                for title, value in latency.percentiles(outcomes(*seconds)).items()
                for prefix in ("", "simulated ")
            }
        )
        for share in latency.SHARES
        for policy, seconds in both.items()
    }


def test_latency_compares_medians_and_draws_three_panels() -> None:
    table = latency_table([1.0, 2.0, 3.0], [2.0, 5.0, 9.0])
    first = latency.conclude(table)[0]
    assert "20 % of capacity: the median latency is 2.00 s" in first
    assert f"2.5 times as long with {STATIC} and 2.5 times as long with {NAIVE}" in first
    assert dashes(latency.chart("t", table)) == ([False] * 3 + [True] * 3) * 3


def test_latency_shows_three_percentiles_and_keeps_all() -> None:
    titles = [f"p{percent}, s" for percent in latency.PERCENTS]
    shown = [title for title in titles if title not in latency.EXPERIMENT.hidden]
    assert shown == ["p50, s", "p90, s", "p99, s"]


def test_load_is_uniform_and_the_same_each_time(texts: Texts) -> None:
    asked = load.asked_at(fixture(texts), [0.1 * n for n in range(500)], name="a")
    assert asked == load.asked_at(fixture(texts), [0.1 * n for n in range(500)], name="a")
    other = load.asked_at(fixture(texts), [0.1 * n for n in range(500)], name="b")
    lengths = [one.output_tokens for one in asked]
    assert lengths == [one.output_tokens for one in other]
    assert not {one.prompt for one in asked} & {one.prompt for one in other}
    assert (min(lengths), max(lengths)) == (1, 128)
    assert statistics.fmean(one.prompt_tokens for one in asked) == pytest.approx(80, rel=0.05)
    assert asked[3].due == pytest.approx(0.3)


def test_load_compares_both_at_the_highest_rate_and_draws_each_batch_size() -> None:
    table = {
        load.case_name(size, share, policy): row(
            {
                f"{prefix}{title}": value
                for prefix in ("", "simulated ")
                for title, value in (
                    ("tokens/s", 100.0 * share),
                    ("median ms a token", 20.0 if policy == CONTINUOUS else 50.0),
                )
            }
        )
        for size in load.BATCH_SIZES
        for share in load.SHARES
        for policy in load.CONTENDERS
    }
    assert (
        "Batch size 4, 90 % of capacity: continuous takes 20.0 ms a token at 90 tokens/s,"
        " static 50.0 ms at 90."
    ) in load.conclude(table)
    assert dashes(load.chart("t", table)) == [False, False, True, True] * len(load.BATCH_SIZES)


def test_the_command_line_knows_every_experiment() -> None:
    assert parse_arguments([]).only == list(PARTS) == ["variance", "latency", "load"]
    with pytest.raises(SystemExit):
        parse_arguments(["--quick", "--record"])
