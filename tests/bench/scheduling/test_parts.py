"""Each part evaluates its measurements and writes its table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.harness.quiet import Quiet
from bench.harness.repeats import Repeated, Sample
from bench.parts.client import Answer, Request
from bench.parts.fixture import Fixture
from bench.parts.outcome import Outcome
from bench.parts.part import Case, Figures, Part, Table, as_json
from bench.parts.texts import Texts
from bench.scheduling import (
    chunking,
    forecasts,
    mixed,
    planner,
    predictions,
    prefix,
    reservation,
    simulator,
    speed,
    tenants,
)
from bench.scheduling.__main__ import PARTS, parse_arguments
from bench.scheduling.simulated import write_trace

from millrace.simulate.trace import read_trace
from millrace_router.scheduler.queue import RequestQueue, WaitingQueue
from millrace_router.scheduler.tenants import TenantQueue

MANY = 8192


def fixture(texts: Texts, *, most_positions: int = MANY, quick: bool = True) -> Fixture:
    return Fixture(
        model=Path("model"),
        texts=texts,
        most_positions=most_positions,
        quick=quick,
        quiet=Quiet(),
        out=Path("out"),
    )


def request(**changes: Any) -> Request:
    return replace(Request(prompt=" ab", prompt_tokens=1, output_tokens=3), **changes)


def answer(asked: Request, due: float, *arrivals: float, **headers: str) -> Answer:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(
        asked, due, list(arrivals), headers=names, ended=max(arrivals, default=due), num_tokens=3
    )


def table(**rows: dict[str, float]) -> Table:
    """Cases by name; a keyword's underscores are spaces."""
    return {name: _row(figures) for name, figures in rows.items()}


def _row(figures: Figures) -> dict[str, Repeated]:
    return {title: Repeated((Sample(value, 0.0),)) for title, value in figures.items()}


def test_a_part_takes_turns_and_marks_what_was_disturbed(texts: Texts) -> None:
    order: list[tuple[str, int]] = []

    def run(where: Fixture, case: Case) -> Figures:
        order.append((case.name, where.repeat))
        where.other_cores = 0.5 if (case.name, where.repeat) == ("b", 1) else 0.0
        return {"size": case.amount * (1 + where.repeat)}

    part = Part(
        name="p",
        title="P",
        method="How.",
        cases=(Case("a", amount=1), Case("b", amount=10)),
        run=run,
        conclude=lambda found: [f"b is {found['b']['size'].median:.0f}."],
    )
    found = part.measure(fixture(texts), repeats=3)
    assert order == [(name, repeat) for repeat in range(3) for name in "ab"]
    assert found["a"]["size"].median == 2
    # 20 was disturbed: what is left are 10 and 30.
    assert [sample.is_clean for sample in found["b"]["size"].samples] == [True, False, True]
    assert found["b"]["size"].median == 20
    lines = part.text(found).splitlines()
    assert lines[0] == "How."
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == ["", "size"]
    assert [cell.strip() for cell in lines[4].split("|")[1:-1]] == ["a", "2.00"]
    assert lines[-1] == "- b is 20."


def test_a_row_may_lack_a_column(texts: Texts) -> None:
    part = Part(name="p", title="P", method="How.", cases=(), run=lambda *_: {})
    text = part.text({"a": _row({"x": 1.0}), "b": _row({"y": 2.0})})
    assert [cell.strip() for cell in text.splitlines()[5].split("|")] == ["", "b", "", "2.00", ""]


def test_prefix_requests_share_the_system_prompt_and_nothing_after(texts: Texts) -> None:
    asked = prefix.requests(fixture(texts, quick=False))
    assert len(asked) == 64
    assert {one.prompt_tokens for one in asked} == {1030}
    words = [one.prompt.split() for one in asked]
    assert len({tuple(one[:1000]) for one in words}) == 1
    assert len({tuple(one[1000:]) for one in words}) == 64


def test_prompts_shrink_to_the_positions_of_a_small_model(texts: Texts) -> None:
    small = fixture(texts, most_positions=1024)
    assert {one.prompt_tokens for one in prefix.requests(small)} == {768 + 30}
    assert chunking.scene(small).long.prompt_tokens == 768
    longest = max(one.prompt_tokens + one.output_tokens for one in reservation.requests(small))
    assert longest <= 768


@pytest.mark.parametrize(("computed", "verdict"), [(9.0, "91.0 % fewer"), (11.0, "missed")])
def test_prefix_concludes_from_tokens_computed(computed: float, verdict: str) -> None:
    names = [case.name for case in prefix.CASES]
    on = {prefix.COMPUTED: computed, "TTFT p50, ms": 10.0}
    off = {prefix.COMPUTED: 100.0, "TTFT p50, ms": 50.0}
    lines = prefix.conclude({name: _row(on if name.endswith(" on") else off) for name in names})
    assert all(verdict in line and "5.0 times shorter" in line for line in lines)


def test_chunking_counts_the_pause_that_outlasts_the_long_prompt() -> None:
    before = [0.01 * n for n in range(100)]
    streams = [answer(request(), 0.0, *before, 3.0, 3.01) for _ in range(2)]
    long = answer(request(), 0.99, 2.99)
    found = chunking.figures(streams, long)
    assert found["between tokens before, p50, ms"] == pytest.approx(10.0)
    assert found["longest, ms"] == pytest.approx(2010.0)
    assert found["its TTFT, ms"] == pytest.approx(2000.0)


def test_mixed_compares_prompts_beside_each_other_with_prompts_alone() -> None:
    arrival = {mixed.SHORT_ALONE: 30.0, mixed.SHORT_BESIDE: 3000.0, mixed.LONG_ALONE: 2000.0}
    arrival |= {mixed.LONG_BESIDE: 2000.0, mixed.LONG_UNDER_LOAD: 2200.0}
    shortest = arrival | {mixed.SHORT_BESIDE: 60.0, mixed.LONG_BESIDE: 2300.0}
    lines = mixed.conclude(
        {case.name: _row(shortest if n % 2 else arrival) for n, case in enumerate(mixed.CASES)}
    )
    assert "100.00 times that without" in lines[0]
    assert "2.00 times that without" in lines[1]
    assert "1.10 times" in lines[0]
    assert lines[4].endswith("1.15.")


def test_mixed_finds_its_prompts_among_all_by_their_length(texts: Texts) -> None:
    short = answer(request(prompt_tokens=mixed.SHORT_TOKENS, output_tokens=1), 1.0, 1.5)
    other = answer(request(prompt_tokens=mixed.SHORT_TOKENS, output_tokens=512), 1.0, 9.0)
    long = Outcome(request(prompt_tokens=7000, output_tokens=1), 4.0, 3.0)
    assert mixed._median([short, other], mixed.SHORT_TOKENS) == 0.5
    assert mixed._median([long], 7000) == 3.0


def test_reservation_asks_for_no_length_and_keeps_its_tail(texts: Texts) -> None:
    asked = reservation.requests(fixture(texts, quick=False))
    assert all("max_new_tokens" not in one.body()["parameters"] for one in asked)
    assert max(one.output_tokens for one in asked) > 5 * reservation.MEDIAN_ANSWER
    assert {one.due for one in asked} == {0.0}


def test_reservation_reports_what_the_counters_gained() -> None:
    answers = [answer(request(), 0.0, 0.5, 1.0, 2.0)]
    found = reservation.figures(
        answers,
        [{"tgi_batch_current_size": 0.0}, {"tgi_batch_current_size": 6.0}],
        before={"millrace_preemptions_total": 2.0},
        after={"millrace_preemptions_total": 5.0},
    )
    assert found[reservation.BATCH] == 6.0
    assert found[reservation.RATE] == pytest.approx(1.5)
    assert found["preemptions"] == 3.0


def test_tenants_compares_the_small_one_with_itself() -> None:
    small, large = (request(headers={"x-tenant": name}) for name in ("small", "large"))
    alone = [answer(small, 0.0, 0.1)]
    both = [answer(small, 0.0, 0.15), answer(large, 0.0, 9.0), answer(large, 0.0, 11.0)]
    found = tenants.figures(alone, both, capacity=5.0)
    assert found[tenants.RATIO] == pytest.approx(1.5)
    assert found["large, mean TTFT, ms"] == pytest.approx(10_000)
    rows = {case.name: _row(found) for case in tenants.CASES}
    assert "goal 2, met" in tenants.conclude(rows)[0]


def test_predictions_mix_announced_and_open_lengths(texts: Texts) -> None:
    asked = predictions.requests(fixture(texts), [0.0, 1.0, 2.0, 3.0], seed="a")
    assert [(one.says_length, one.streams) for one in asked] == [(True, False), (False, True)] * 2
    assert [one.due for one in asked] == [0.0, 1.0, 2.0, 3.0]


def test_prediction_errors_are_of_the_headers_and_the_metrics() -> None:
    whole, streamed = request(streams=False), request()
    answers = [
        answer(whole, 0.0, x_predicted_queue_time="100", x_queue_time="150"),
        answer(whole, 0.0, x_queue_time="9000"),
        answer(streamed, 0.0, 0.7, x_predicted_queue_time="1"),
    ]
    series = predictions.SERIES.format("first_token", "90")
    found = predictions.figures(answers, {series: 0.2})
    assert found["queue p50, ms"] == pytest.approx(150)
    assert found["queue error p90, ms"] == pytest.approx(50)
    assert found["TTFT p50, ms"] == pytest.approx(700)
    assert found["TTFT error p90, ms"] == pytest.approx(200)


def test_a_trace_is_what_the_simulator_reads(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    asked = [
        request(due=2.5, prompt_tokens=7, output_tokens=9, headers={"x-tenant": "small"}),
        request(due=0.5, prompt_tokens=5, output_tokens=3, says_length=False),
    ]
    write_trace(asked, path)
    first, second = read_trace(path)
    assert (first.arrived_at, first.prompt_tokens, first.output_tokens) == (0.5, 5, 3)
    assert first.max_new_tokens is None
    assert (second.arrived_at, second.max_new_tokens, second.tenant) == (2.5, 9, "small")


@pytest.mark.parametrize(("simulated", "line"), [(1.15, "All within 20 %."), (0.75, "Further")])
def test_the_simulator_is_judged_by_its_ratios(simulated: float, line: str) -> None:
    answers = [answer(request(), 0.0, 0.6, 1.0)]
    measured = dict(zip(simulator.COMPARED, (3.0, 500.0, 500.0), strict=True))
    predicted = {title: simulated * value for title, value in measured.items()}
    found = simulator.figures(answers, [0.5], predicted, hindsight=measured)
    assert found["TTFT p50 at clients, ms"] == pytest.approx(600)
    for title in simulator.COMPARED:
        assert found[f"{title}: ratio"] == pytest.approx(simulated)
        assert found[f"{title}: ratio in hindsight"] == pytest.approx(1.0)
    assert simulator.conclude(table(loop=dict(found)))[0].startswith(line)


def test_first_tokens_are_read_from_the_log_of_requests(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    lines = [
        {"route": "/info"},
        *({"time_to_first_token": seconds} for seconds in (0.1, 0.2, 0.3)),
    ]
    log.write_text("".join(json.dumps({"fields": line}) + "\n" for line in lines) + '{"cut')
    assert simulator.logged_first_tokens(log, after=1, count=2) == [0.2, 0.3]


def test_a_log_that_lags_for_ever_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulator, "LOG_SECONDS", 0.0)
    log = tmp_path / "requests.jsonl"
    log.write_text('{"fields": {"time_to_first_token": 0.1}}\n')
    with pytest.raises(simulator.LogLags):
        simulator.logged_first_tokens(log, after=1, count=1)


@pytest.mark.parametrize("queue", [WaitingQueue(), TenantQueue(quantum=64)])
def test_planner_steps_keep_the_batch_full_and_the_queue_as_long(
    queue: RequestQueue,
) -> None:
    steps = planner.Steps(queue, num_waiting=30)
    ended = 0
    for _ in range(planner.WARM_STEPS):
        before = set(map(id, steps.planner.rows.values()))
        steps.step()
        ended += len(before - set(map(id, steps.planner.rows.values())))
        assert len(queue) + len(steps.planner.rows) >= 30
    assert len(steps.planner.rows) > 0.9 * planner.NUM_RUNNING
    assert len(queue) >= 30
    assert ended > planner.NUM_RUNNING


def test_planner_judges_cost_and_growth() -> None:
    def rows(last: float) -> Table:
        costs = {"100 waiting": 80.0, "10000 waiting": 90.0, "100000 waiting": last}
        return {name: _row({planner.TOTAL: cost}) for name, cost in costs.items()}

    assert planner.conclude(rows(100.0))[1].endswith("1.25 times: flat.")
    assert planner.conclude(rows(800.0))[1].endswith("NOT flat.")


def test_a_table_is_kept_with_every_sample() -> None:
    table = {"a": {"x, ms": Repeated((Sample(1.0, 0.0), Sample(3.0, 0.0), Sample(9.0, 0.5)))}}
    assert as_json(table) == {
        "a": {"x, ms": {"median": 2.0, "samples": [[1.0, 0.0], [3.0, 0.0], [9.0, 0.5]]}}
    }


def test_the_command_line_knows_every_part() -> None:
    assert parse_arguments([]).only == list(PARTS)
    assert parse_arguments(["--only", "prefix,planner"]).only == ["prefix", "planner"]
    with pytest.raises(SystemExit):
        parse_arguments(["--only", "prefix,nonsense"])


def test_what_a_quick_run_finds_is_not_recorded() -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--quick", "--record"])


@pytest.mark.parametrize("name", forecasts.PIPELINES)
def test_forecasts_are_compared_with_what_the_simulator_then_does(texts: Texts, name: str) -> None:
    figures = forecasts.run(fixture(texts), Case(name, (name,), 0.5))
    for title in ("queue", "TTFT"):
        assert 0 < figures[f"{title} error p50, ms"] < figures[f"{title} p50, ms"]


def test_the_simulator_s_speed_is_counted_in_requests_it_has_finished(texts: Texts) -> None:
    idle, busy = (speed.run(fixture(texts), Case("", amount=rate)) for rate in (1, 8))
    assert idle["batch size, mean"] < busy["batch size, mean"]
    assert idle["steps of a request"] > busy["steps of a request"] > 1
    assert idle[speed.MILLION] == pytest.approx(1e6 / 60 / idle[speed.RATE])
