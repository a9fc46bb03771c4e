"""Names of adapters as labels: bounded, and in vLLM's form."""

from __future__ import annotations

from millrace_router.telemetry.exposition import render
from millrace_router.telemetry.metrics import MAX_NAMES, OTHER, Metrics


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
