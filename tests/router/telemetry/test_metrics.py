"""The text of /metrics, recent values, and the report of the load."""

from __future__ import annotations

import json
import random
import re
from bisect import bisect_left

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Counter as LibraryCounter
from prometheus_client.parser import text_string_to_metric_families

from millrace_router.telemetry.instruments import CONTENT_TYPE, render
from millrace_router.telemetry.load_report import LoadReport
from millrace_router.telemetry.metrics import DURATION_BUCKETS, MAX_NAMES, OTHER, Metrics
from millrace_router.telemetry.recent import Recent, quantile
from millrace_testing.router.edge import limits_with, serving

TGI_NAMES = {
    "counter": (
        "tgi_request_count tgi_request_success tgi_request_failure tgi_batch_concat "
        "tgi_batch_inference_count tgi_batch_inference_success tgi_batch_inference_failure"
    ),
    "gauge": (
        "tgi_queue_size tgi_batch_current_size tgi_batch_current_max_tokens "
        "tgi_batch_max_total_tokens millrace_kv_blocks_in_use millrace_kv_blocks "
        "millrace_requests_running millrace_requests_waiting"
    ),
    "histogram": (
        "tgi_request_duration tgi_request_validation_duration tgi_request_queue_duration "
        "tgi_request_inference_duration tgi_request_mean_time_per_token_duration "
        "tgi_request_generated_tokens tgi_request_input_length tgi_request_max_new_tokens "
        "tgi_request_skipped_tokens tgi_batch_next_size tgi_batch_inference_duration "
        "tgi_batch_forward_duration tgi_batch_decode_duration tgi_batch_filter_duration "
        "tgi_batch_concat_duration millrace_time_to_first_token_seconds "
        "millrace_inter_token_latency_seconds"
    ),
}
LABELS = {"request_failure": "err", "batch_concat": "reason"}


def new_metrics() -> Metrics:
    return Metrics(max_input_tokens=1000, max_total_tokens=2000)


def touch_all(metrics: Metrics) -> None:
    for kind, names in TGI_NAMES.items():
        for name in names.split():
            attribute = name.removeprefix("tgi_").removeprefix("millrace_")
            instrument = getattr(metrics, attribute)
            if hasattr(instrument, "labels"):
                instrument = instrument.labels(**{LABELS.get(attribute, "method"): "x"})
            {"counter": lambda i: i.inc(), "gauge": lambda i: i.set(1)}.get(
                kind, lambda i: i.observe(1)
            )(instrument)


def test_an_untouched_metric_is_not_shown() -> None:
    metrics = new_metrics()
    assert render(metrics.registry) == b""
    metrics.request_failure.labels(err="overloaded")
    assert render(metrics.registry) == b""
    metrics.queue_size.set(0)
    assert b"\ntgi_queue_size 0\n" in render(metrics.registry)


def test_followed_values_are_read_at_each_scrape() -> None:
    metrics, waiting = new_metrics(), ["a request"]
    metrics.queue_size.follow(lambda: len(waiting))
    assert b"\ntgi_queue_size 1\n" in render(metrics.registry)
    waiting.append("another")
    assert b"\ntgi_queue_size 2\n" in render(metrics.registry)


def test_every_name_and_type_is_tgis() -> None:
    metrics = new_metrics()
    touch_all(metrics)
    text = render(metrics.registry).decode()
    shown = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert shown == {name: kind for kind, names in TGI_NAMES.items() for name in names.split()}
    assert "_total " not in text
    assert "_created" not in text
    for line in text.splitlines():
        assert re.fullmatch(
            r'(# (HELP|TYPE) .+)|([a-z_]+(\{[a-z]+="[^"]*"(,le="[^"]*")?\})? \S+)|([a-z_]+\{le="[^"]*"\} \S+)|',
            line,
        ), line


def test_the_parser_of_prometheus_reads_the_metrics_back() -> None:
    metrics = new_metrics()
    touch_all(metrics)
    metrics.request_generated_tokens.observe(1e9)
    families = {
        f.name: f for f in text_string_to_metric_families(render(metrics.registry).decode())
    }
    samples = {
        (s.name, s.labels.get("le")): s.value
        for s in families["tgi_request_generated_tokens"].samples
    }
    assert samples["tgi_request_generated_tokens_bucket", "20"] == 1
    assert samples["tgi_request_generated_tokens_bucket", "2000"] == 1
    assert samples["tgi_request_generated_tokens_bucket", "+Inf"] == 2
    assert samples["tgi_request_generated_tokens_count", None] == 2
    assert samples["tgi_request_generated_tokens_sum", None] == 1e9 + 1


def test_series_for_alerts_exist_from_the_start() -> None:
    metrics = new_metrics()
    metrics.show_recoveries()
    metrics.recoveries.labels(reason="hung").inc()
    metrics.recovery_seconds.observe(2.0)
    lines = render(metrics.registry).decode().splitlines()
    assert "# TYPE millrace_recoveries_total counter" in lines
    for line in (
        *(
            f'millrace_recoveries_total{{reason="{reason}"}} {int(reason == "hung")}'
            for reason in ("lost", "hung", "failed", "out_of_memory", "planned")
        ),
        "millrace_recovering 0",
        "millrace_requests_replayed_total 0",
        "millrace_tokens_recomputed_total 0",
        "millrace_requests_quarantined_total 0",
        "millrace_recovery_duration_sum 2",
    ):
        assert line in lines


@pytest.mark.parametrize("value", [0, 1, 1.5, 8, 9])
def test_an_observation_counts_from_its_bucket_on(value: float) -> None:
    metrics = new_metrics()
    metrics.request_skipped_tokens.observe(value)
    text = render(metrics.registry).decode()
    buckets = re.findall(r'skipped_tokens_bucket\{le="(\S+)"\} (\d)', text)
    first = bisect_left(range(9), value)
    assert buckets == [
        (str(bound) if bound < 9 else "+Inf", str(int(bound >= first))) for bound in range(10)
    ]


def test_library_collectors_are_written_without_additions_and_escaped() -> None:
    registry = CollectorRegistry()
    counter = LibraryCounter("things", 'a "b"\nc\\', ["kind"], registry=registry)
    counter.labels(kind='x"\n\\').inc(2.5)
    assert render(registry).decode() == (
        '# HELP things a "b"\\nc\\\\\n# TYPE things counter\nthings{kind="x\\"\\n\\\\"} 2.5\n'
    )


async def test_requests_leave_the_expected_metrics() -> None:
    async with serving(limits=limits_with(max_concurrent_requests=1)) as edge:
        await edge.post("/generate", {"inputs": "a b", "parameters": {"max_new_tokens": 2}})
        await edge.post("/generate", {"inputs": "", "parameters": {}})
        asked = {"inputs": "a", "parameters": {"best_of": 2, "do_sample": True}}
        assert (await edge.post("/generate", asked))[0] == 429
        status, body, response = await edge.get("/metrics")
    assert status == 200
    assert response.headers["content-type"] == CONTENT_TYPE
    lines = body.decode().splitlines()
    for line in (
        "tgi_request_count 3",
        "tgi_request_success 1",
        'tgi_request_failure{err="validation"} 1',
        'tgi_request_failure{err="overloaded"} 1',
        "tgi_request_generated_tokens_sum 2",
        "tgi_request_input_length_sum 2",
        "tgi_request_max_new_tokens_sum 2",
        "tgi_request_duration_count 1",
        "tgi_request_mean_time_per_token_duration_count 1",
        "millrace_time_to_first_token_seconds_count 1",
        "millrace_inter_token_latency_seconds_count 1",
    ):
        assert line in lines


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


def test_both_forms_of_the_report_agree() -> None:
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


async def test_only_clients_that_request_it_get_the_load_report() -> None:
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


class SteppedClock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def started() -> tuple[Metrics, SteppedClock, Recent]:
    metrics, clock = Metrics(max_input_tokens=8, max_total_tokens=16), SteppedClock()
    return metrics, clock, Recent(metrics, clock)


def generate(metrics: Metrics, tokens: int, *, first: float = 0.2) -> None:
    """Count one request of so many tokens."""
    metrics.time_to_first_token_seconds.observe(first)
    metrics.inter_token_latency_seconds.observe(0.01, times=tokens - 1)


def test_rates_are_those_of_the_last_minute() -> None:
    metrics, clock, recent = started()
    generate(metrics, 100)
    clock.now += 50.0
    assert recent.window().tokens_per_second == pytest.approx(2.0)
    for _ in range(70):
        clock.now += 1.0
        generate(metrics, 10)
        recent.window()
    window = recent.window()
    assert window.seconds == 60.0
    assert window.tokens_per_second == pytest.approx(10.0)
    assert recent.uptime_seconds == 120.0


def test_the_rate_covers_the_time_since_the_last_reading() -> None:
    metrics, clock, recent = started()
    clock.now += 5.0
    recent.window()
    clock.now += 1000.0
    generate(metrics, 500)
    assert recent.window().seconds == 1000.0
    clock.now += 0.25
    assert recent.window().tokens_per_second == pytest.approx(500 / 1000.25)
    clock.now += 1.75
    generate(metrics, 20)
    window = recent.window()
    assert window.seconds == 2.0
    assert window.tokens_per_second == pytest.approx(10.0)


def test_two_readers_at_once_see_the_same_window() -> None:
    metrics, clock, recent = started()
    for _ in range(10):
        clock.now += 2.0
        generate(metrics, 4)
        one = recent.window()
        clock.now += 0.001
        other = recent.window()
        assert other.begin == one.begin
        clock.now -= 0.001


def test_cache_hits_are_a_share_of_the_prompts_of_the_window() -> None:
    metrics, clock, recent = started()
    metrics.prefill_tokens.inc(1000)
    clock.now += 2.0
    assert recent.window().cached_share == 0.0
    clock.now += 90.0
    assert recent.window().cached_share is None
    metrics.prefill_tokens.inc(25)
    metrics.prefix_cache_hit_tokens.inc(75)
    clock.now += 2.0
    assert recent.window().cached_share == 0.75


def test_nothing_has_happened_at_the_start() -> None:
    _, _, recent = started()
    window = recent.window()
    assert (window.seconds, window.tokens_per_second, window.cached_share) == (0.0, 0.0, None)
    assert window.first_token_seconds(0.5) is None


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.95, 1.0])
def test_percentiles_are_in_the_bucket_of_the_true_ones(share: float) -> None:
    metrics, clock, recent = started()
    random.seed(3)
    for _ in range(50):
        metrics.time_to_first_token_seconds.observe(100.0)
    clock.now += 100.0
    recent.window()
    values = [random.lognormvariate(-2, 1) for _ in range(999)]
    for value in values:
        metrics.time_to_first_token_seconds.observe(value)
    clock.now += 10.0
    percentile = recent.window().first_token_seconds(share)
    assert percentile is not None
    bounds = np.array([0.0, *DURATION_BUCKETS])
    expected = np.quantile(values, share, method="inverted_cdf")
    at = int(np.searchsorted(bounds, expected))
    assert bounds[at - 1] <= percentile <= bounds[at]


def test_quantile_handles_empty_and_outermost_buckets() -> None:
    assert quantile([1.0, 2.0], [0, 0, 0], 0.5) is None
    assert quantile([1.0, 2.0], [4, 0, 0], 0.5) == 0.5
    assert quantile([1.0, 2.0], [0, 4, 0], 0.25) == 1.25
    assert quantile([1.0, 2.0], [0, 0, 3], 0.5) == 2.0


def shown(metrics: Metrics, name: str) -> list[str]:
    lines = render(metrics.registry).decode().splitlines()
    return [line for line in lines if line.startswith(name)]


def test_the_first_names_have_series_and_all_others_share_one() -> None:
    metrics = Metrics(max_input_tokens=10, max_total_tokens=20)
    for number in range(2 * MAX_NAMES):
        metrics.adapter_requests.count(f"a{number}")
    metrics.adapter_requests.count("a0")
    lines = shown(metrics, "millrace_adapter_requests_total")
    assert len(lines) == MAX_NAMES + 1
    assert 'millrace_adapter_requests_total{adapter="a0"} 2' in lines
    assert f'millrace_adapter_requests_total{{adapter="{OTHER}"}} {MAX_NAMES}' in lines


def test_the_metric_of_gateways_has_one_sample_and_the_time_of_its_change() -> None:
    metrics = Metrics(max_input_tokens=10, max_total_tokens=20)
    info, now = metrics.lora_requests_info, [5.0]
    info._clock = lambda: now[0]
    assert shown(metrics, "vllm:") == []
    info.max_lora = 4
    info.update(running=["b", "a", "a"], waiting=["c"])
    now[0] = 6.0
    info.update(running=["a", "b"], waiting=["c"])
    labels = 'max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters="c"'
    assert shown(metrics, "vllm:") == [f"vllm:lora_requests_info{{{labels}}} 5"]
    info.update(running=[], waiting=[])
    labels = 'max_lora="4",running_lora_adapters="",waiting_lora_adapters=""'
    assert shown(metrics, "vllm:") == [f"vllm:lora_requests_info{{{labels}}} 6"]
