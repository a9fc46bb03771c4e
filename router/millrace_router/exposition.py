"""Prometheus text format 0.0.4 with TGI's names: counters keep theirs, without `_total` and `_created`.

The client library's own writer cannot leave the suffix away, and the dashboards ask for the bare names.
"""

from __future__ import annotations

from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from millrace_router.metrics import format_number

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ESCAPE = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_ESCAPE_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})


def render(registry: Collector) -> bytes:
    """Write every sample of `registry`."""
    lines: list[str] = []
    for metric in registry.collect():
        lines.append(f"# HELP {metric.name} {metric.documentation.translate(_ESCAPE_HELP)}")
        lines.append(f"# TYPE {metric.name} {metric.type}")
        lines.extend(_line(sample) for sample in metric.samples if not _is_created(sample))
        lines.append("")
    return "\n".join(lines).encode()


def _is_created(sample: Sample) -> bool:
    return sample.name.endswith("_created")


def _line(sample: Sample) -> str:
    if not sample.labels:
        return f"{sample.name} {_value(sample.value)}"
    labels = ",".join(f'{key}="{text.translate(_ESCAPE)}"' for key, text in sample.labels.items())
    return f"{sample.name}{{{labels}}} {_value(sample.value)}"


def _value(value: float) -> str:
    special = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}
    text = repr(float(value))
    return special.get(text) or format_number(float(value))
