"""Metrics as they are read back."""

from __future__ import annotations

import pytest
from bench.harness.scrape import grown, parse

from millrace_router.telemetry.instruments import render
from millrace_router.telemetry.metrics import Metrics


def exposed() -> str:
    metrics = Metrics(max_input_tokens=100, max_total_tokens=200)
    metrics.prefill_tokens.inc(1234)
    metrics.batch_current_size.set(7)
    metrics.prediction_error.labels(prediction="first_token", percentile="90").set(0.25)
    metrics.time_to_first_token_seconds.observe(0.5)
    return render(metrics.registry).decode()


def test_what_the_router_exposes_is_read_back_by_the_names_that_the_parts_use() -> None:
    samples = parse(exposed())
    assert samples["millrace_prefill_tokens_total"] == 1234
    assert samples["tgi_batch_current_size"] == 7
    series = 'millrace_prediction_error_seconds{prediction="first_token",percentile="90"}'
    assert samples[series] == 0.25
    assert samples["millrace_time_to_first_token_seconds_count"] == 1


def test_labels_may_hold_spaces_and_values_may_be_special() -> None:
    samples = parse('# HELP a b\n\na{reason="not now"} 3\nb +Inf\nc 1e-05\n')
    assert samples == {'a{reason="not now"}': 3.0, "b": float("inf"), "c": 1e-05}


@pytest.mark.parametrize("line", ["alone", "name value"])
def test_what_is_no_sample_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"sample|float"):
        parse(line)


def test_a_counter_that_was_never_touched_counts_from_zero() -> None:
    assert grown({}, {"a": 5.0}, "a") == 5.0
    assert grown({"a": 2.0}, {"a": 5.0}, "a") == 3.0
    assert grown({}, {}, "a") == 0.0
