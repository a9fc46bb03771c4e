from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev

import pytest
from pydantic import ValidationError

from millrace.simulate.workload import Workload


def workload(**values: object) -> Workload:
    return Workload.model_validate(values)


def test_the_same_seed_gives_the_same_requests_and_another_seed_others() -> None:
    options = {"rate": 3.0, "requests": 50, "prompt_tokens": "lognormal:100:1"}
    one, again, other = (list(workload(seed=seed, **options).arrivals()) for seed in (1, 1, 2))
    assert one == again
    assert one != other


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


def test_requests_are_the_same_at_every_rate() -> None:
    slow, fast = (
        list(workload(rate=rate, requests=50, output_tokens="uniform:1:999").arrivals())
        for rate in (1.0, 10.0)
    )
    assert [a._replace(arrived_at=0.0) for a in slow] == [a._replace(arrived_at=0.0) for a in fast]


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


def test_tenants_send_by_their_weights() -> None:
    arrivals = workload(rate=1.0, requests=5100, tenant_weights="50,1").arrivals()
    counts = Counter(arrival.tenant for arrival in arrivals)
    assert set(counts) == {"1", "2"}
    assert counts["2"] == pytest.approx(100, rel=0.3)


def test_a_trace_is_replayed_faster(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrived_at,prompt_tokens,output_tokens\n1,2,3\n9,8,7\n", encoding="utf-8")
    arrivals = list(workload(trace=trace, speedup=4).arrivals())
    assert [arrival.arrived_at for arrival in arrivals] == [0.25, 2.25]


def test_a_trace_may_be_cut(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    lines = "".join(f"{second},{second},3\n" for second in (1, 2, 3, 90))
    trace.write_text(f"arrived_at,prompt_tokens,output_tokens\n{lines}", encoding="utf-8")
    arrivals = workload(trace=trace, trace_requests=3).arrivals()
    assert [arrival.prompt_tokens for arrival in arrivals] == [1, 2, 3]


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
def test_what_contradicts_itself_is_refused(values: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        workload(**values)
