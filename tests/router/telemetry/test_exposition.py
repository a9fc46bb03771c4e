"""The text of /metrics."""

from __future__ import annotations

import re
from bisect import bisect_left

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Counter as LibraryCounter
from prometheus_client.parser import text_string_to_metric_families

from millrace_router.telemetry.exposition import CONTENT_TYPE, render
from millrace_router.telemetry.metrics import Metrics
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


def test_the_clients_own_parser_reads_it_back() -> None:
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


def test_what_alerts_watch_is_there_from_the_start() -> None:
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


async def test_what_requests_leave_behind() -> None:
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
