from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from millrace.simulate.metrics import Distribution
from millrace.simulate.simulated_request import Arrival
from millrace.simulate.trace import TraceError, read_trace
from millrace.simulate.workload import Lengths, Workload


def workload(**values: object) -> Workload:
    return Workload.model_validate(values)


def test_a_poisson_process_has_its_rate_and_no_memory() -> None:
    times = [arrival.arrived_at for arrival in workload(rate=4.0, requests=20_000).arrivals()]
    gaps = [later - one for one, later in pairwise(times)]
    assert len(times) == 20_000
    assert mean(gaps) == pytest.approx(0.25, rel=0.03)
    assert pstdev(gaps) == pytest.approx(0.25, rel=0.03)


def test_bursts_come_at_once_and_keep_to_the_rate() -> None:
    arrivals = workload(rate=4.0, burst_size=10, requests=20_000).arrivals()
    sizes = Counter(arrival.arrived_at for arrival in arrivals)
    assert set(sizes.values()) == {10}
    assert 20_000 / max(sizes) == pytest.approx(4.0, rel=0.05)


def test_each_prompt_begins_with_one_of_the_system_prompts() -> None:
    arrivals = list(
        workload(
            rate=1.0, requests=300, prefix_groups=3, prefix_tokens=1000, prompt_tokens="20"
        ).arrivals()
    )
    assert {arrival.group for arrival in arrivals} == {"0", "1", "2"}
    assert {(arrival.prompt_tokens, arrival.prefix_tokens) for arrival in arrivals} == {
        (1020, 1000)
    }


def test_a_trace_is_replayed_faster(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrived_at,prompt_tokens,output_tokens\n1,2,3\n9,8,7\n", encoding="utf-8")
    arrivals = list(workload(trace=trace, speedup=4).arrivals())
    assert [arrival.arrived_at for arrival in arrivals] == [0.25, 2.25]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({}, "give one of --trace, --rate and --clients"),
        ({"rate": 1, "clients": 1}, "give one of"),
        ({"clients": 1, "burst_size": 2}, "--burst-size goes with --rate"),
        ({"rate": 1, "speedup": 2}, "--speedup goes with --trace"),
        ({"rate": 1, "trace_requests": 2}, "--trace-requests goes with --trace"),
        ({"rate": 1, "tenant_weights": "1,0"}, "--tenant-weights must be above 0"),
        ({"rate": 0}, "greater than 0"),
        ({"rate": 1, "rats": 2}, "not permitted"),
    ],
)
def test_contradictory_workloads_are_refused(values: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        workload(**values)


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_csv_and_json_lines_are_read_alike(tmp_path: Path) -> None:
    csv = written(
        tmp_path,
        "a.csv",
        "arrived_at,prompt_tokens,output_tokens,max_new_tokens,group,prefix_tokens,priority,tenant,"
        "max_queue_seconds\n"
        "0.5,10,20,,,,,,\n"
        "1,30,40,50,chat,25,-3,acme,2.5\n",
    )
    lines = written(
        tmp_path,
        "a.jsonl",
        '{"arrived_at": 0.5, "prompt_tokens": 10, "output_tokens": 20, "group": null}\n'
        "\n"
        '{"arrived_at": 1, "prompt_tokens": 30, "output_tokens": 40, "max_new_tokens": 50,'
        ' "group": "chat", "prefix_tokens": 25, "priority": -3, "tenant": "acme",'
        ' "max_queue_seconds": 2.5}\n',
    )
    expected = [Arrival(0.5, 10, 20), Arrival(1.0, 30, 40, 50, "chat", 25, -3, "acme", 2.5)]
    assert list(read_trace(csv)) == expected
    assert list(read_trace(lines)) == expected


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("1,2", "not as many fields"),
        ("1,2,3,4,5", "not as many fields"),
        ("x,2,3,", "arrived_at is 'x', not a number of seconds"),
        ("nan,2,3,", "arrived_at is 'nan'"),
        ("-1,2,3,", "arrived_at is '-1'"),
        ("1,0,3,", "prompt_tokens is '0', not a number of tokens, 1 or more"),
        ("1,2.5,3,", "prompt_tokens is '2.5'"),
        ("1,2,,", "output_tokens is missing"),
        ("0.2,2,3,", "arrives before the request above it"),
        ("1,2,3,4", "prefix_tokens without a group"),
    ],
)
def test_a_bad_line_of_csv_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    header = "arrived_at,prompt_tokens,output_tokens,prefix_tokens"
    path = written(tmp_path, "bad.csv", f"{header}\n0.5,2,3,\n{line}\n")
    with pytest.raises(TraceError, match=rf"bad\.csv:3: {complaint}"):
        list(read_trace(path))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "Expecting property name"),
        ("[1]", "not a JSON object"),
        ('{"arrived_at": 1, "prompt_tokens": 2}', "output_tokens is missing"),
        ('{"arrived_at": true, "prompt_tokens": 2, "output_tokens": 3}', "arrived_at is True"),
        ('{"arrived_at": 1, "prompt_tokens": 2.5, "output_tokens": 3}', "prompt_tokens is 2.5"),
        ('{"arrived_at": 1, "prompt_tokens": [2], "output_tokens": 3}', "prompt_tokens is "),
        (
            '{"arrived_at": 1, "prompt_tokens": 2, "output_tokens": 3, "priority": 11}',
            "priority is 11, not an integer from -10 to 10",
        ),
        (
            '{"arrived_at": 1, "prompt_tokens": 2, "output_tokens": 3, "outptu": 1}',
            "unknown field 'outptu'; there are arrived_at, prompt_tokens",
        ),
    ],
)
def test_a_bad_line_of_json_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    good = '{"arrived_at": 0, "prompt_tokens": 2, "output_tokens": 3}'
    path = written(tmp_path, "bad.jsonl", f"{good}\n{line}\n")
    with pytest.raises(TraceError, match=rf"bad\.jsonl:2: {complaint}"):
        list(read_trace(path))


def drawn(text: str, count: int = 20_000) -> list[int]:
    random, lengths = Random(1), Lengths.parse(text)
    return [lengths.draw(random) for _ in range(count)]


def test_pareto_has_its_least_and_tail() -> None:
    values = drawn("pareto:100:2")
    assert min(values) == 100
    assert sum(value >= 200 for value in values) / len(values) == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "-5", "nan", "inf", "normal:3:4", "uniform:6:3", "pareto:3", "fixed:1:2:3"],
)
def test_a_malformed_length_is_refused_with_the_syntax(text: str) -> None:
    with pytest.raises(ValueError, match="is not a length: use 512, uniform:LEAST:MOST"):
        Lengths.parse(text)


VALUES = st.lists(st.floats(min_value=0.0, max_value=1e6), min_size=1, max_size=60)


def filled(values: list[float]) -> Distribution:
    distribution = Distribution()
    for value in values:
        distribution.add(value)
    return distribution


@given(VALUES, st.floats(min_value=0.1, max_value=100.0))
def test_percentiles_are_those_of_the_nearest_rank_within_one_percent(
    values: list[float], percent: float
) -> None:
    exact = sorted(values)[math.ceil(len(values) * percent / 100) - 1]
    assert filled(values).percentile(percent) == pytest.approx(exact, rel=0.0101, abs=0.0)


@given(VALUES)
def test_count_and_mean_are_exact(values: list[float]) -> None:
    distribution = filled(values)
    assert distribution.count == len(values)
    assert distribution.mean == pytest.approx(math.fsum(values) / len(values))
