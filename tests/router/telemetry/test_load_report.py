"""ORCA's report in answers, read as Envoy and JSON read it."""

from __future__ import annotations

import json

import pytest

from millrace_router.telemetry.load_report import LoadReport
from millrace_router.telemetry.metrics import Metrics
from millrace_testing.router.edge import serving

HEADER = "endpoint-load-metrics"
ASKED = {"inputs": "a", "parameters": {"max_new_tokens": 3}}


class Clock:
    """A clock that stands still until the test advances it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def busy_metrics(*, kv_usage: float, running: int, waiting: int) -> Metrics:
    metrics = Metrics(max_input_tokens=8, max_total_tokens=16)
    metrics.kv_cache_usage_ratio.set(kv_usage)
    metrics.requests_running.set(running)
    metrics.requests_waiting.set(waiting)
    return metrics


def read_text(report: str) -> dict[str, float]:
    """Native HTTP of ORCA: `TEXT name=number, name=number`."""
    assert report.startswith("TEXT ")
    pairs = (pair.split("=") for pair in report.removeprefix("TEXT ").split(","))
    return {name.strip(): float(value) for name, value in pairs}


@pytest.mark.parametrize(
    ("kv_usage", "running", "waiting", "utilization"),
    [(0.5, 1, 0, 0.5), (0.125, 3, 0, 0.75), (0.5, 4, 4, 2.0), (0.0, 0, 0, 0.0)],
)
def test_utilization_is_that_of_the_scarcer_of_slots_and_blocks(
    kv_usage: float, running: int, waiting: int, utilization: float
) -> None:
    metrics = busy_metrics(kv_usage=kv_usage, running=running, waiting=waiting)
    report = LoadReport(metrics, 4, Clock()).render("TEXT")
    assert report is not None
    assert read_text(report) == {
        "application_utilization": utilization,
        "rps_fractional": 0.0,
        "named_metrics.kv_cache_usage_perc": kv_usage,
        "named_metrics.num_requests_waiting": waiting,
    }


def test_both_forms_say_the_same() -> None:
    load = LoadReport(busy_metrics(kv_usage=0.25, running=1, waiting=2), 4, Clock())
    text, as_json = load.render("text"), load.render("json")
    assert text is not None
    assert as_json is not None
    assert as_json.startswith("JSON ")
    report = json.loads(as_json.removeprefix("JSON "))
    named = {f"named_metrics.{name}": value for name, value in report.pop("named_metrics").items()}
    assert read_text(text) == report | named


def test_the_rate_is_that_of_the_last_ten_to_twenty_seconds() -> None:
    metrics, clock = busy_metrics(kv_usage=0, running=0, waiting=0), Clock()
    load = LoadReport(metrics, 4, clock)

    def rate() -> float:
        return read_text(load.render("TEXT") or "")["rps_fractional"]

    metrics.request_count.inc(3)
    assert rate() == 3.0
    for per_second in (8, 2):
        for _ in range(40):
            clock.now += 1
            metrics.request_count.inc(per_second)
            rate()
        assert rate() == per_second


async def test_only_who_asks_gets_it() -> None:
    async with serving() as edge:
        for path in ("/generate", "/generate_stream"):
            _, _, silent = await edge.post(path, ASKED)
            assert HEADER not in silent.headers
            for form in ("TEXT", "JSON"):
                headers = {"endpoint-load-metrics-format": form}
                status, _, told = await edge.post(path, ASKED, headers=headers)
                assert (status, told.headers[HEADER].split()[0]) == (200, form)
            headers = {"endpoint-load-metrics-format": "BIN"}
            assert HEADER not in (await edge.post(path, ASKED, headers=headers))[2].headers
