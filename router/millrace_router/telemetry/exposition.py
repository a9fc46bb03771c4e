"""Prometheus text format 0.0.4 with TGI's names: counters keep theirs, without `_total` and `_created`.

The client library's own writer always adds the suffix, but TGI's dashboards query the bare names.
"""

from __future__ import annotations

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from millrace_router.telemetry.instruments import format_number

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ESCAPE = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_ESCAPE_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})


def render(registry: Collector) -> bytes:
    """Write every sample of `registry`."""
    lines: list[str] = []
    for metric in registry.collect():
        lines.append(f"# HELP {metric.name} {metric.documentation.translate(_ESCAPE_HELP)}")
        lines.append(f"# TYPE {metric.name} {metric.type}")
        lines.extend(
            _line(_bare_name(metric, sample), sample)
            for sample in metric.samples
            if sample.name != f"{metric.name}_created"
        )
        lines.append("")
    return "\n".join(lines).encode()


def _bare_name(metric: Metric, sample: Sample) -> str:
    return metric.name if sample.name == f"{metric.name}_total" else sample.name


def _line(name: str, sample: Sample) -> str:
    if not sample.labels:
        return f"{name} {_value(sample.value)}"
    labels = ",".join(f'{key}="{text.translate(_ESCAPE)}"' for key, text in sample.labels.items())
    return f"{name}{{{labels}}} {_value(sample.value)}"


def _value(value: float) -> str:
    special = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}
    text = repr(float(value))
    return special.get(text) or format_number(float(value))
