"""Section 7: every series of TGI's, by name, type, labels and buckets, and what requests add to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from millrace_router.telemetry.instruments import Family, render
from millrace_router.telemetry.metrics import Metrics
from millrace_testing.contract.contract import ABSENT, COLUMNS, Held, Reply, Rule, exactly, fits
from millrace_testing.router.edge import limits_with

MAX_INPUT, MAX_TOTAL = 700, 900
DURATIONS = tuple(0.0001 * 1.5**power for power in range(1, 36))
INPUTS = tuple(MAX_INPUT / 100 * step for step in range(1, 101))
TOTALS = tuple(MAX_TOTAL / 100 * step for step in range(1, 101))
BATCHES = tuple(range(1, 1025))
GUESSES = tuple(range(9))
METHODS = ("prefill", "decode")
CAUSES = ("overloaded", "validation", "generation", "dropped", "incomplete", "template", "internal")
REASONS = ("backpressure", "wait_exceeded", "chunking")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One row of section 7.2, and our differences in both columns."""

    name: str
    type: str
    bounds: Sequence[float] = ()
    """The upper bounds of its buckets, except the last."""
    label: str = ""
    values: tuple[str, ...] = ("",)
    """The values of the label."""

    def __str__(self) -> str:
        return self.name


def counter(name: str, label: str = "", values: tuple[str, ...] = ("",)) -> Series:
    """A number that only grows."""
    return Series(name=name, type="counter", label=label, values=values)


def histogram(
    name: str, bounds: Sequence[float], label: str = "", values: tuple[str, ...] = ("",)
) -> Series:
    """Numbers by size."""
    return Series(name=name, type="histogram", bounds=bounds, label=label, values=values)


SERIES = [
    counter("tgi_request_count"),
    counter("tgi_request_success"),
    counter("tgi_request_failure", "err", CAUSES),
    histogram("tgi_request_duration", DURATIONS),
    histogram("tgi_request_validation_duration", DURATIONS),
    histogram("tgi_request_queue_duration", DURATIONS),
    histogram("tgi_request_inference_duration", DURATIONS),
    histogram("tgi_request_mean_time_per_token_duration", DURATIONS),
    histogram("tgi_request_generated_tokens", TOTALS),
    histogram("tgi_request_input_length", INPUTS),
    histogram("tgi_request_max_new_tokens", TOTALS),
    # A summary in TGI, whose dashboard reads buckets all the same.
    histogram("tgi_request_skipped_tokens", GUESSES),
    Series(name="tgi_queue_size", type="gauge"),
    histogram("tgi_batch_next_size", BATCHES),
    Series(name="tgi_batch_current_size", type="gauge"),
    Series(name="tgi_batch_current_max_tokens", type="gauge"),
    counter("tgi_batch_concat", "reason", REASONS),
    counter("tgi_batch_inference_count", "method", METHODS),
    counter("tgi_batch_inference_success", "method", METHODS),
    counter("tgi_batch_inference_failure", "method", METHODS),
    histogram("tgi_batch_inference_duration", DURATIONS, "method", METHODS),
    histogram("tgi_batch_forward_duration", DURATIONS, "method", METHODS),
    histogram("tgi_batch_decode_duration", DURATIONS, "method", METHODS),
    histogram("tgi_batch_filter_duration", DURATIONS, "method", METHODS),
    histogram("tgi_batch_concat_duration", DURATIONS, "method", ("decode",)),
    # TGI means to show it and never does.
    Series(name="tgi_batch_max_total_tokens", type="gauge"),
]


def instruments_of(metrics: Metrics, series: Series) -> list[Any]:
    """The instruments that update the series, by the values of its label."""
    family = getattr(metrics, series.name.removeprefix("tgi_"))
    if not series.label:
        return [family]
    return [family.labels(**{series.label: value}) for value in series.values]


@pytest.mark.parametrize("series", SERIES, ids=str)
def test_a_series_is_tgis(series: Series) -> None:
    metrics = Metrics(max_input_tokens=MAX_INPUT, max_total_tokens=MAX_TOTAL)
    instruments = instruments_of(metrics, series)
    assert render(metrics.registry) == b"", "7.1: a series appears with its first update"
    for instrument in instruments:
        update = instrument.observe if series.type == "histogram" else instrument.inc
        update(1.0)
    text = render(metrics.registry).decode()
    (family,) = text_string_to_metric_families(text)
    assert (family.name, family.type) == (series.name, series.type)
    assert f"# TYPE {series.name} {series.type}\n" in text
    assert "_total" not in text.replace("_total_tokens", "")
    assert {sample.labels.get(series.label, "") for sample in family.samples} == {*series.values}
    bounds = [
        float(sample.labels["le"])
        for sample in family.samples
        if "le" in sample.labels and sample.labels.get(series.label, "") == series.values[0]
    ]
    assert bounds[:-1] == pytest.approx(series.bounds, rel=1e-12)
    assert bounds[-1:] == [float("inf")] * bool(series.bounds)


def test_buckets_are_written_in_full() -> None:
    metrics = Metrics(max_input_tokens=MAX_INPUT, max_total_tokens=MAX_TOTAL)
    metrics.request_duration.observe(1)
    assert b'_bucket{le="0.00015000000000000001"} 0\n' in render(metrics.registry)


def test_there_is_no_series_of_tgis_name_that_tgi_has_not() -> None:
    metrics = Metrics(max_input_tokens=MAX_INPUT, max_total_tokens=MAX_TOTAL)
    collectors = metrics.registry._collector_to_names
    families = {one.name for one in collectors if isinstance(one, Family)}
    assert {name for name in families if name.startswith("tgi_")} == set(map(str, SERIES))


NATIVE = {"inputs": "hello world", "parameters": {"max_new_tokens": 2}}
CHAT = {"messages": [{"role": "user", "content": "hello world"}], "max_tokens": 2}
COMPLETION = {"prompt": ["hello", "world"], "max_tokens": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """The increments of the counters by one request."""

    says: str
    path: str
    body: Any
    count: int
    """To `tgi_request_count`."""
    strict_count: int | None = None
    """None: the same."""
    success: int = 1
    failures: Mapping[str, int] = field(default_factory=dict)
    server: str = "counted"

    def __str__(self) -> str:
        return f"7.2 {self.says}"


def added(says: str, path: str, body: Any, count: int, **more: Any) -> Addition:
    """An addition."""
    return Addition(says=says, path=path, body=body, count=count, **more)


INVALID = {"success": 0, "failures": {"validation": 1}}
ADDITIONS = [
    added("a request", "/generate", NATIVE, 1),
    added("a stream", "/generate_stream", NATIVE, 1),
    added("POST /", "/", NATIVE, 1),
    added("SageMaker's", "/invocations", NATIVE, 1),
    added(
        "best_of",
        "/generate",
        {"inputs": "a", "parameters": {"best_of": 2, "do_sample": True}},
        1,
    ),
    added("a chat", "/v1/chat/completions", CHAT, 1, strict_count=2),
    added("a chat's stream", "/v1/chat/completions", CHAT | {"stream": True}, 1, strict_count=2),
    added("SageMaker's chat", "/invocations", CHAT, 1, strict_count=2),
    added("each prompt", "/v1/completions", COMPLETION, 2, strict_count=3, success=2),
    added("each instance", "/vertex", {"instances": [NATIVE, CHAT]}, 2, strict_count=3, success=2),
    added("tokens of a chat", "/chat_tokenize", CHAT, 0, strict_count=1, success=0),
    added("tokens", "/tokenize", NATIVE, 0, success=0),
    added("a request that is not valid", "/generate", {"inputs": ""}, 1, **INVALID),
    added(
        "a chat that is not valid",
        "/v1/chat/completions",
        CHAT | {"stop": list("abcde")},
        1,
        strict_count=2,
        **INVALID,
    ),
    added("a body of another shape", "/generate", {}, 0, success=0),
    added("a chat of another shape", "/v1/chat/completions", {}, 0, success=0),
    added(
        "being overloaded",
        "/generate",
        NATIVE,
        1,
        success=0,
        failures={"overloaded": 1},
        server="full",
    ),
    added(
        "no template",
        "/v1/chat/completions",
        CHAT,
        1,
        strict_count=2,
        success=0,
        failures={"template": 1},
        server="templateless",
    ),
]


def totals(held: Held) -> dict[str, float]:
    """Values of the counters of requests."""
    metrics = held.edge.services.metrics
    failures = {cause: metrics.request_failure.labels(err=cause).value for cause in CAUSES}
    return {
        "count": metrics.request_count.value,
        "success": metrics.request_success.value,
        **failures,
    }


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("addition", ADDITIONS, ids=str)
def test_a_request_adds_to_the_metrics_of_tgi(
    servers: Callable[[str, str], Held], addition: Addition, column: str
) -> None:
    held = servers(addition.server, column)
    before = totals(held)
    rule = Rule(
        section="7.2",
        says=addition.says,
        path=addition.path,
        body=addition.body,
        default=Reply(),
    )
    held.ask(rule)
    change = {name: value - before[name] for name, value in totals(held).items()}
    count = addition.count
    if column == "strict" and addition.strict_count is not None:
        count = addition.strict_count
    failures = {cause: addition.failures.get(cause, 0) for cause in CAUSES}
    assert change == {"count": count, "success": addition.success, **failures}


def test_requests_are_counted_in_tgis_histograms() -> None:
    held = Held(limits=limits_with())
    try:
        rule = Rule(section="7.2", says="", path="/generate", body=NATIVE, default=Reply())
        held.ask(rule)
        text = render(held.edge.services.metrics.registry).decode()
    finally:
        held.close()
    for line in (
        "tgi_request_generated_tokens_sum 2",
        "tgi_request_input_length_sum 2",
        "tgi_request_max_new_tokens_sum 2",
        *(
            f"tgi_request_{name}_count 1"
            for name in (
                "duration",
                "validation_duration",
                "queue_duration",
                "inference_duration",
                "mean_time_per_token_duration",
                "generated_tokens",
            )
        ),
    ):
        assert line in text.splitlines()


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        (1, 1),
        ({"a": 1, "b": 2}, {"a": 1}),
        ({"a": None}, {"a": ABSENT}),
        ({}, {"a": ABSENT}),
        ([{"a": 1}], [{"a": int}]),
        ("ab", re.compile("a.")),
        ({"a": 1, "b": [2]}, exactly({"a": 1, "b": [2]})),
        (None, ...),
    ],
)
def test_values_that_fit_are_accepted(given: Any, pattern: Any) -> None:
    assert fits(given, pattern)


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        (1, 2),
        (1, True),
        (False, 0),
        ({}, {"a": 1}),
        ({"a": 2}, {"a": 1}),
        ({"a": 0}, {"a": ABSENT}),
        ([], [1]),
        ([1, 1], [1]),
        ("abc", re.compile("a.")),
        ({"a": "1"}, {"a": int}),
        ({"b": 2, "a": 1}, exactly({"a": 1, "b": 2})),
        ({"a": 1, "b": 2}, exactly({"a": 1})),
        ("text", {"a": 1}),
    ],
)
def test_values_that_do_not_fit_are_refused(given: Any, pattern: Any) -> None:
    assert not fits(given, pattern)
