"""Instruments of metrics (counters, gauges, histograms, and families of them) and the text that `/metrics` answers.

The client library's own instruments take a lock and walk all buckets on each observation, and show series that were
never touched. These are collectors of an ordinary `CollectorRegistry`, so the library's collectors can be registered
next to them. All updates happen on the event loop's thread.

The text is Prometheus format 0.0.4 with TGI's names: counters keep theirs, without `_total` and `_created`. The client
library's own writer always adds the suffix, but TGI's dashboards query the bare names.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import ClassVar, Generic, TypeVar

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


class Counter:
    """A number that only increases."""

    kind: ClassVar[str] = "counter"
    __slots__ = ("touched", "value")

    def __init__(self) -> None:
        self.touched = False
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add `amount`, which must not be negative."""
        self.touched = True
        self.value += amount

    def samples(self) -> Iterator[tuple[str, str | None, float]]:
        """Yield (name suffix, bucket bound, value)."""
        yield "", None, self.value


class Gauge:
    """A number that may rise and fall."""

    kind: ClassVar[str] = "gauge"
    __slots__ = ("_read", "_value", "touched")

    def __init__(self) -> None:
        self.touched = False
        self._value = 0.0
        self._read: Callable[[], float] | None = None

    @property
    def value(self) -> float:
        return self._value if self._read is None else self._read()

    def follow(self, read: Callable[[], float]) -> None:
        """From now on show what `read` returns at the time of a scrape."""
        self.touched = True
        self._read = read

    def inc(self, amount: float = 1.0) -> None:
        self.touched = True
        self._value += amount

    def set(self, value: float) -> None:
        self.touched = True
        self._value = value

    def samples(self) -> Iterator[tuple[str, str | None, float]]:
        """Yield (name suffix, bucket bound, value)."""
        yield "", None, self.value


class Histogram:
    """Counts of observations by bucket; an observation equal to a bound belongs to that bound."""

    kind: ClassVar[str] = "histogram"
    __slots__ = ("bounds", "counts", "total", "touched")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.touched = False
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, *, times: int = 1) -> None:
        """Count one or several observations of the same value."""
        self.touched = True
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def samples(self) -> Iterator[tuple[str, str | None, float]]:
        """Yield (name suffix, bucket bound, value); bucket values are cumulative."""
        bounds = [*map(format_number, self.bounds), "+Inf"]
        for bound, cumulative in zip(bounds, accumulate(self.counts), strict=True):
            yield "_bucket", bound, cumulative
        yield "_sum", None, self.total
        yield "_count", None, sum(self.counts)


def format_number(value: float) -> str:
    """Render with the fewest digits that give the same double again, integers without a point."""
    return str(int(value)) if value.is_integer() else repr(value)


Instrument = TypeVar("Instrument", Counter, Gauge, Histogram)


class Family(Collector, Generic[Instrument]):
    """All series of one metric; a series is shown from its first update on."""

    def __init__(
        self,
        name: str,
        documentation: str,
        make: Callable[[], Instrument],
        *,
        labels: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.documentation = documentation
        self.kind = make().kind
        self._make: Callable[[], Instrument] = make
        self._label_names = labels
        self._series: dict[tuple[str, ...], Instrument] = {}

    def labels(self, **labels: str) -> Instrument:
        """Return the series of these label values; KeyError if one is missing."""
        key = tuple([labels[name] for name in self._label_names])
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = self._make()
        return series

    def series(self) -> Iterator[Instrument]:
        """Yield all series, whatever their labels."""
        yield from self._series.values()

    def collect(self) -> Iterator[Metric]:
        """Yield the metric if any of its series has been updated."""
        metric = Metric(self.name, self.documentation, self.kind)
        for values, series in self._series.items():
            if not series.touched:
                continue
            labels = dict(zip(self._label_names, values, strict=True))
            for suffix, bound, value in series.samples():
                extra = {} if bound is None else {"le": bound}
                metric.add_sample(self.name + suffix, labels | extra, value)
        if metric.samples:
            yield metric

    def describe(self) -> Iterator[Metric]:
        """Yield the metric without samples, by which the registry finds duplicates."""
        yield Metric(self.name, self.documentation, self.kind)


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
