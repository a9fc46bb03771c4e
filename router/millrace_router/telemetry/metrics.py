"""Everything the router counts, under TGI's names and buckets.

The instruments are ours because the library's keep a lock and walk every bucket on each observation, and show
series that were never touched. They are collectors of an ordinary `CollectorRegistry`, so library collectors
can be registered beside them. All updates happen on the event loop's thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import ClassVar, Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

DURATION_BUCKETS: tuple[float, ...] = tuple(
    accumulate(range(34), lambda bound, _: bound * 1.5, initial=0.0001 * 1.5)
)
"""Seconds, 35 bounds from 0.15 ms to 145.6 s; multiplied step by step, so that the text equals TGI's."""
BATCH_SIZE_BUCKETS: tuple[float, ...] = tuple(float(size) for size in range(1, 1025))
SKIPPED_TOKENS_BUCKETS: tuple[float, ...] = tuple(float(count) for count in range(9))
RECOVERY_REASONS = ("lost", "hung", "failed", "out_of_memory", "planned")
"""Values of `reason` in `millrace_recoveries_total`."""


def length_buckets(limit: int) -> tuple[float, ...]:
    """Split 0 … `limit` tokens into 100 equal buckets."""
    return tuple(limit / 100.0 * step for step in range(1, 101))


class Counter:
    """A number that only grows."""

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
    """A number that goes up and down."""

    kind: ClassVar[str] = "gauge"
    __slots__ = ("_read", "_value", "touched")

    def __init__(self) -> None:
        self.touched = False
        self._value = 0.0
        self._read: Callable[[], float] | None = None

    @property
    def value(self) -> float:
        """The number now."""
        return self._value if self._read is None else self._read()

    def follow(self, read: Callable[[], float]) -> None:
        """Show what `read` returns at the moment of asking, from now on."""
        self.touched = True
        self._read = read

    def inc(self, amount: float = 1.0) -> None:
        """Add `amount`."""
        self.touched = True
        self._value += amount

    def dec(self, amount: float = 1.0) -> None:
        """Subtract `amount`."""
        self.inc(-amount)

    def set(self, value: float) -> None:
        """Replace the value."""
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
        """Count an observation, or several of the same value."""
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
    """Render as the fewest digits that read back to the same double, integers without a point."""
    return str(int(value)) if value.is_integer() else repr(value)


Instrument = TypeVar("Instrument", Counter, Gauge, Histogram)


class Family(Collector, Generic[Instrument]):
    """All series of one metric name; a series is shown from its first update on."""

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
        """Name the metric, used or not, so that the registry notices a duplicate."""
        yield Metric(self.name, self.documentation, self.kind)


class Metrics:
    """The router's metrics; attributes are the exposed names without `tgi_` or `millrace_`."""

    def __init__(self, *, max_input_tokens: int, max_total_tokens: int) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        generated = length_buckets(max_total_tokens)
        self._requests(inputs=length_buckets(max_input_tokens), generated=generated)
        self._batches()
        self._additions()
        self._survival()

    def _requests(self, *, inputs: Sequence[float], generated: Sequence[float]) -> None:
        counter, histogram, duration = self._counter, self._histogram, self._duration
        self.request_count = counter("tgi_request_count", "Requests received")
        self.request_success = counter("tgi_request_success", "Requests that ended normally")
        self.request_failure = self._family(
            "tgi_request_failure", "Requests that failed, by cause", Counter, "err"
        )
        self.request_duration = duration("tgi_request_duration", "Arrival to end")
        self.request_validation_duration = duration(
            "tgi_request_validation_duration", "Arrival to queued"
        )
        self.request_queue_duration = duration("tgi_request_queue_duration", "Queued to batched")
        self.request_inference_duration = duration(
            "tgi_request_inference_duration", "Batched to end"
        )
        self.request_mean_time_per_token_duration = duration(
            "tgi_request_mean_time_per_token_duration", "Inference time per generated token"
        )
        self.request_generated_tokens = histogram(
            "tgi_request_generated_tokens", "Generated tokens per request", generated
        )
        self.request_input_length = histogram(
            "tgi_request_input_length", "Prompt tokens per request", inputs
        )
        self.request_max_new_tokens = histogram(
            "tgi_request_max_new_tokens", "Tokens a request may generate", generated
        )
        self.request_skipped_tokens = histogram(
            "tgi_request_skipped_tokens",
            "Tokens a step yielded beyond the first, per sequence",
            SKIPPED_TOKENS_BUCKETS,
        )

    def _batches(self) -> None:
        gauge, duration = self._gauge, self._duration_by_method
        self.queue_size = gauge("tgi_queue_size", "Requests that wait for a batch")
        self.batch_next_size = self._histogram(
            "tgi_batch_next_size", "Requests admitted together", BATCH_SIZE_BUCKETS
        )
        self.batch_current_size = gauge("tgi_batch_current_size", "Sequences in the batch")
        self.batch_current_max_tokens = gauge(
            "tgi_batch_current_max_tokens", "Tokens the batch may grow to"
        )
        self.batch_max_total_tokens = gauge(
            "tgi_batch_max_total_tokens", "Tokens the KV cache has room for"
        )
        self.batch_concat = self._family(
            "tgi_batch_concat", "Admissions into a running batch", Counter, "reason"
        )
        self.batch_inference_count = self._family(
            "tgi_batch_inference_count", "Steps sent", Counter, "method"
        )
        self.batch_inference_success = self._family(
            "tgi_batch_inference_success", "Steps that succeeded", Counter, "method"
        )
        self.batch_inference_failure = self._family(
            "tgi_batch_inference_failure", "Steps that failed", Counter, "method"
        )
        self.batch_inference_duration = duration(
            "tgi_batch_inference_duration", "Step, by the router's clock"
        )
        self.batch_forward_duration = duration("tgi_batch_forward_duration", "Forward pass")
        self.batch_decode_duration = duration("tgi_batch_decode_duration", "Choosing tokens")
        self.batch_filter_duration = duration(
            "tgi_batch_filter_duration", "Handing out tokens and dropping sequences"
        )
        self.batch_concat_duration = duration(
            "tgi_batch_concat_duration", "Admitting sequences into a running batch"
        )

    def _additions(self) -> None:
        gauge, duration = self._gauge, self._duration
        self.time_to_first_token_seconds = duration(
            "millrace_time_to_first_token_seconds", "Arrival to first token"
        )
        self.inter_token_latency_seconds = duration(
            "millrace_inter_token_latency_seconds", "Time between tokens of one request"
        )
        self.kv_blocks_in_use = gauge("millrace_kv_blocks_in_use", "KV blocks owned by sequences")
        self.kv_blocks = gauge("millrace_kv_blocks", "KV blocks there are")
        self.kv_blocks_cached = gauge(
            "millrace_kv_blocks_cached", "KV blocks kept for a later prefix hit, free on demand"
        )
        self.prefill_tokens = self._counter(
            "millrace_prefill_tokens_total", "Prompt tokens that were computed"
        )
        self.prefix_cache_hit_tokens = self._counter(
            "millrace_prefix_cache_hit_tokens_total", "Prompt tokens found in the prefix cache"
        )
        self.preemptions = self._counter(
            "millrace_preemptions_total", "Sequences paused because KV blocks ran out"
        )
        self.speculation_drafted_tokens = self._counter(
            "millrace_speculation_drafted_tokens_total", "Tokens that were guessed"
        )
        self.speculation_accepted_tokens = self._counter(
            "millrace_speculation_accepted_tokens_total", "Guesses that were right"
        )
        self.prediction_error = self._family(
            "millrace_prediction_error_seconds",
            "Absolute error of the last thousand predictions, by percentile, in seconds",
            Gauge,
            "prediction",
            "percentile",
        )
        self.grammars = self._family(
            "millrace_grammars_total", "Grammars that the shards were asked for", Counter, "outcome"
        )
        self.grammar_seconds = duration(
            "millrace_grammar_duration_seconds", "Until it was known whether a grammar can be had"
        )
        self.journal_dropped_records = self._counter(
            "millrace_journal_dropped_records_total", "Records that --journal could not keep"
        )
        self.request_log_dropped_lines = self._counter(
            "millrace_request_log_dropped_lines_total", "Lines that --log-requests could not keep"
        )
        self.requests_paused = gauge("millrace_requests_paused", "Requests that were preempted")
        self.requests_running = gauge("millrace_requests_running", "Requests in the batch")
        self.requests_waiting = gauge("millrace_requests_waiting", "Requests in the queue")

    def _survival(self) -> None:
        self.recoveries = self._family(
            "millrace_recoveries_total", "Times the shards stopped serving", Counter, "reason"
        )
        self.recovery_seconds = self._duration(
            "millrace_recovery_duration", "Until the shards served again"
        )
        self.recovering = self._gauge("millrace_recovering", "1 while the shards do not serve")
        self.requests_replayed = self._counter(
            "millrace_requests_replayed_total", "Requests that were computed again after a failure"
        )
        self.requests_quarantined = self._counter(
            "millrace_requests_quarantined_total", "Requests refused because they break the shards"
        )

    def show_survival(self) -> None:
        """Show at zero what alerts watch: to Prometheus a series that begins at 1 has not increased."""
        for reason in RECOVERY_REASONS:
            self.recoveries.labels(reason=reason).inc(0)
        self.recovering.set(0)
        self.requests_replayed.inc(0)
        self.requests_quarantined.inc(0)

    def _family(
        self, name: str, documentation: str, make: Callable[[], Instrument], *labels: str
    ) -> Family[Instrument]:
        family = Family(name, documentation, make, labels=labels)
        self.registry.register(family)
        return family

    def _counter(self, name: str, documentation: str) -> Counter:
        return self._family(name, documentation, Counter).labels()

    def _gauge(self, name: str, documentation: str) -> Gauge:
        return self._family(name, documentation, Gauge).labels()

    def _histogram(self, name: str, documentation: str, bounds: Sequence[float]) -> Histogram:
        return self._family(name, documentation, partial(Histogram, bounds)).labels()

    def _duration(self, name: str, documentation: str) -> Histogram:
        return self._histogram(name, f"{documentation}, in seconds", DURATION_BUCKETS)

    def _duration_by_method(self, name: str, documentation: str) -> Family[Histogram]:
        make = partial(Histogram, DURATION_BUCKETS)
        return self._family(name, f"{documentation}, in seconds", make, "method")
