"""Each experiment runs, and its figures follow from arrivals, names and rounds."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.adapters import loading, mixed, peers, zipf
from bench.adapters.__main__ import PARTS, main, parse_arguments
from bench.adapters.adapter_files import ALL, flags
from bench.adapters.experiment import Experiment, compared, verdict
from bench.adapters.names import Names
from bench.adapters.streams import decode_rate, gaps, requests
from bench.harness.repeats import Repeated, Sample
from bench.parts.client import Answer, Request
from bench.parts.fixture import Fixture
from bench.parts.part import Case, Figures


def answer(*arrivals: float) -> Answer:
    asked = Request(prompt=" ab", prompt_tokens=1, output_tokens=len(arrivals))
    return Answer(asked, 0.0, [*arrivals], num_tokens=len(arrivals))


def repeated(*values: float) -> Repeated:
    return Repeated(tuple(Sample(value, 0.0) for value in values))


EACH = [pytest.param(name, marks=() if name == "mixed" else pytest.mark.long) for name in PARTS]


@pytest.mark.parametrize("name", EACH)
def test_every_experiment_runs(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--quick", "--model=demo", "--repeats=1", f"--only={name}", f"--out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["bench.adapters", *options])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    measured = {line.split("|")[1].strip() for line in lines if line.startswith("| ")}
    wanted = {case.name for case in PARTS[name].cases}
    if name == "peers":
        wanted = {peers.case_name(engine, 8) for engine in ("millrace", peers.PEFT.name)}
    assert measured - {""} == wanted
    assert any(line.startswith("- ") for line in lines)


def test_rounds_turn_their_order_and_samples_keep_the_load_of_their_round(
    fixture: Fixture,
) -> None:
    order = list[str]()

    def run(where: Fixture, repeats: int) -> Iterator[tuple[str, Figures]]:
        def measure(name: str) -> Figures:
            number = len(order) // 2
            order.append(name)
            # The load beside one case counts for its whole round.
            where.other_cores = 0.5 if (name, number) == ("b", 1) else 0.0
            return {"tokens/s": 10.0 if name == "a" else 8.0 + number}

        yield from compared(where, repeats, ["a", "b"], "test", measure)

    experiment = Experiment(
        name="e", title="E", method="How.", cases=tuple(map(Case, "abc")), run=run
    )
    table = experiment.measure(fixture, repeats=3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert list(table) == ["a", "b"]
    assert [sample.value for sample in table["b"]["ratio"].samples] == [0.8, 0.9, 1.0]
    assert [sample.is_clean for sample in table["b"]["ratio"].samples] == [True, False, True]


def test_the_rate_leaves_out_the_first_token_and_what_came_before_it() -> None:
    answers = [answer(2.0, 3.0, 4.0), answer(2.5, 3.0, 6.0)]
    assert decode_rate(answers) == pytest.approx(5 / 4)


def test_gaps_count_once_all_streams_have_a_token() -> None:
    answers = [answer(1.0, 2.0, 4.0, 7.0), answer(3.0, 8.0)]
    assert sorted(gaps(answers)) == [2.0, 3.0, 5.0]


def test_requests_name_their_adapters(fixture: Fixture) -> None:
    bodies = [one.body() for one in requests(fixture, ["", "x"], output_tokens=3, seed="s")]
    assert "adapter_id" not in bodies[0]["parameters"]
    assert bodies[1]["parameters"]["adapter_id"] == "x"
    assert bodies[0]["inputs"] != bodies[1]["inputs"]


def test_zipf_draws_the_first_names_most_and_the_same_each_time() -> None:
    names = [str(number) for number in range(1000)]
    drawn = zipf.drawn(names, 20_000)
    assert drawn == zipf.drawn(names, 20_000)
    counts = Counter(drawn)
    # The n-th name has 1/n of the first one's share.
    assert counts["0"] / counts["1"] == pytest.approx(2, rel=0.1)
    assert counts["0"] / counts["9"] == pytest.approx(10, rel=0.2)


def test_streams_share_the_adapters_of_a_peer_in_turn() -> None:
    asked = peers.asked_of_peer(["a", "b", "a"], 5)
    assert [one.adapter for one in asked] == ["a", "b", "a"]
    assert {len(one.ids) for one in asked} == {32}
    assert asked == peers.asked_of_peer(["a", "b", "a"], 5)


def test_gaps_beside_loads_are_compared_with_both_others() -> None:
    found = {
        name: {loading.GAP: gap}
        for name, gap in zip(loading.CASES, (10.0, 12.0, 15.0), strict=True)
    }
    rows = dict(loading.with_ratios(found))
    assert rows[loading.LOADING][loading.GAP_RATIO] == pytest.approx(1.5)
    assert rows[loading.LOADING][loading.GAP_OVER_RESIDENT] == pytest.approx(1.25)
    assert rows[loading.NOTHING][loading.GAP_RATIO] == 1


def test_a_verdict_compares_the_median_with_the_goal() -> None:
    assert verdict(repeated(0.9, 0.99, 1.2), 0.99) == "0.99 (goal at least 0.99: met)"
    assert "missed" in verdict(repeated(0.9, 0.98, 1.2), 0.99)
    assert verdict(repeated(49.0), 50, at_least=False) == "49.0 (goal at most 50: met)"
    assert "missed" in verdict(repeated(51.0), 50, at_least=False)


def test_mixed_names_the_goals_of_both_shapes() -> None:
    row = {"ratio": repeated(0.8)}
    lines = mixed.conclude({case.name: row for case in mixed.EXPERIMENT.cases})
    assert lines[2] == "32 adapters: 0.80 times the base's tokens/s (goal 0.8 at 135M, 0.85 at 1B)."


def test_flags_register_folders(tmp_path: Path) -> None:
    given = flags({"x": tmp_path / "x"}, tmp_path / "cache")
    assert f"--lora-modules=x={tmp_path / 'x'}" in given
    assert f"--adapter-cache={tmp_path / 'cache'}" in given
    assert len(ALL) == 7


def test_made_up_names_are_of_three_kinds_and_none_is_found() -> None:
    names = Names(num_registered=4)
    made_up = [names.made_up(number) for number in range(9)]
    assert len(set(made_up)) == 9
    assert made_up[1].startswith("made-up/")
    assert made_up[2].startswith("org/adapter-2@sha256:")
    asyncio.run(names.ask(0, 30))


def test_the_command_line_knows_every_experiment() -> None:
    options = parse_arguments([])
    assert options.only == ["unused", "mixed", "zipf", "loading", "registered", "peers"]
    assert options.repeats == 5
