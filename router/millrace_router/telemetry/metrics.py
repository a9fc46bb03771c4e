"""The router's metrics, with TGI's names and buckets where TGI has the metric."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from millrace_router.telemetry.instruments import Counter, Family, Gauge, Histogram, Instrument

DURATION_BUCKETS: tuple[float, ...] = tuple(
    accumulate(range(34), lambda bound, _: bound * 1.5, initial=0.0001 * 1.5)
)
"""Seconds, 35 bounds from 0.15 ms to 145.6 s; multiplied step by step, so that the text equals TGI's."""
BATCH_SIZE_BUCKETS: tuple[float, ...] = tuple(float(size) for size in range(1, 1025))
SKIPPED_TOKENS_BUCKETS: tuple[float, ...] = tuple(float(count) for count in range(9))
RECOVERY_REASONS = ("lost", "hung", "failed", "out_of_memory", "planned")
"""Values of `reason` in `millrace_recoveries_total`."""
DROP_REASONS = ("empty", "life", "entry", "key")
"""Values of `reason` in `millrace_kv_stores_dropped_total`."""
MAX_NAMES = 100
"""Adapters with a series each."""
OTHER = "other"
"""Label of all adapters after the first `MAX_NAMES`."""


def length_buckets(limit: int) -> tuple[float, ...]:
    """Split 0 to `limit` tokens into 100 equal buckets."""
    return tuple(limit / 100.0 * step for step in range(1, 101))


class RequestsByAdapter:
    """Counts requests by adapter; the first names have a series each, and all later ones share one."""

    def __init__(self, family: Family[Counter]) -> None:
        self._family = family
        self._names: set[str] = set()

    def count(self, name: str) -> None:
        """Count a request for the adapter `name`."""
        if name not in self._names and len(self._names) < MAX_NAMES:
            self._names.add(name)
        label = name if name in self._names else OTHER
        self._family.labels(adapter=label).inc()


class LoraRequestsInfo(Collector):
    """vLLM's gauge for gateways: names of running and waiting adapters as labels, and the time of the last change."""

    NAME = "vllm:lora_requests_info"

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.max_lora = 0
        """The most adapters in the shards at a time; the metric has no samples if there are none."""
        self._clock = clock
        self._running: frozenset[str] = frozenset()
        self._waiting: frozenset[str] = frozenset()
        self._changed_at = clock()

    def update(self, *, running: Iterable[str], waiting: Iterable[str]) -> None:
        """Replace the names of the adapters of running requests, and of those that wait for their adapter."""
        now_running, now_waiting = frozenset(running), frozenset(waiting)
        if (now_running, now_waiting) != (self._running, self._waiting):
            self._running, self._waiting = now_running, now_waiting
            self._changed_at = self._clock()

    def collect(self) -> Iterator[Metric]:
        """Yield one sample, or nothing without adapters."""
        if not self.max_lora:
            return
        metric = Metric(self.NAME, "Adapters of running and of waiting requests", "gauge")
        labels = {
            "max_lora": str(self.max_lora),
            "running_lora_adapters": _joined(self._running),
            "waiting_lora_adapters": _joined(self._waiting),
        }
        metric.add_sample(self.NAME, labels, self._changed_at)
        yield metric

    def describe(self) -> Iterator[Metric]:
        """Yield the metric without samples."""
        yield Metric(self.NAME, "Adapters of running and of waiting requests", "gauge")


def _joined(names: Iterable[str]) -> str:
    """Return at most `MAX_NAMES` names, separated by commas."""
    return ",".join(sorted(names)[:MAX_NAMES])


class Metrics:
    """The router's metrics; attributes are the exposed names without `tgi_` or `millrace_`."""

    def __init__(self, *, max_input_tokens: int, max_total_tokens: int) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        generated = length_buckets(max_total_tokens)
        self._requests(inputs=length_buckets(max_input_tokens), generated=generated)
        self._batches()
        self._additions()
        self._kv_cache()
        self._recoveries()
        self._adapters()
        self._images()

    def _images(self) -> None:
        self.images_decoded = self._counter(
            "millrace_images_decoded_total", "Images that were decoded"
        )
        self.image_tiles_encoded = self._counter(
            "millrace_image_tiles_encoded_total", "Tiles of images that the shards encoded"
        )
        self.image_bytes = self._gauge(
            "millrace_image_bytes", "Bytes of images in the router's memory"
        )
        self.image_rows_in_use = self._gauge(
            "millrace_image_rows_in_use", "Rows of features of images on the shards"
        )

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
            "millrace_speculation_drafted_tokens_total", "Draft tokens that were verified"
        )
        self.speculation_accepted_tokens = self._counter(
            "millrace_speculation_accepted_tokens_total", "Draft tokens that were accepted"
        )
        self.prediction_error = self._family(
            "millrace_prediction_error_seconds",
            "Absolute error of the last thousand predictions, by percentile, in seconds",
            Gauge,
            "prediction",
            "percentile",
        )
        self._drops()
        self.grammars = self._family(
            "millrace_grammars_total", "Grammars sent to the shards", Counter, "outcome"
        )
        self.grammar_seconds = duration(
            "millrace_grammar_duration_seconds", "Until a grammar was compiled or refused"
        )
        self.requests_paused = gauge("millrace_requests_paused", "Requests that were preempted")
        self.requests_running = gauge("millrace_requests_running", "Requests in the batch")
        self.requests_waiting = gauge("millrace_requests_waiting", "Requests in the queue")
        self.wait_seconds = gauge(
            "millrace_wait_seconds",
            "Predicted time in the queue of a mean request that arrives now, in seconds",
        )

    def _drops(self) -> None:
        self.journal_dropped_records = self._counter(
            "millrace_journal_dropped_records_total", "Records that --journal could not keep"
        )
        self.connections_closed = self._family(
            "millrace_connections_closed_total",
            "Connections closed that waited for their clients",
            Counter,
            "bound",
        )
        self.request_log_dropped_lines = self._counter(
            "millrace_request_log_dropped_lines_total", "Lines that --log-requests could not keep"
        )

    def _kv_cache(self) -> None:
        gauge = self._gauge
        self.kv_blocks_in_use = gauge("millrace_kv_blocks_in_use", "KV blocks owned by sequences")
        self.kv_blocks = gauge("millrace_kv_blocks", "KV blocks in all")
        self.kv_cache_usage_ratio = gauge(
            "millrace_kv_cache_usage_ratio",
            "Share of the KV blocks that sequences own, 0 to 1, in the group of layers where it is largest",
        )
        self.cache_config_info = self._family(
            "millrace_cache_config_info",
            "Positions in a KV block, and KV blocks in all, as labels",
            Gauge,
            "block_size",
            "num_gpu_blocks",
        )
        self.state_pages = gauge(
            "millrace_state_pages", "Pages of states of recurrent layers in all; 0 without any"
        )
        self.state_pages_in_use = gauge(
            "millrace_state_pages_in_use", "Pages of states owned by sequences"
        )
        self.state_copies = gauge(
            "millrace_state_copies",
            "Copies of states kept for a later prefix hit, free on demand",
        )
        self.kv_blocks_cached = gauge(
            "millrace_kv_blocks_cached", "KV blocks kept for a later prefix hit, free on demand"
        )
        self.kv_window_blocks = gauge(
            "millrace_kv_window_blocks", "KV blocks of layers with an attention window in all"
        )
        self.kv_window_blocks_in_use = gauge(
            "millrace_kv_window_blocks_in_use",
            "KV blocks of layers with an attention window owned by sequences",
        )
        self.kv_window_blocks_cached = gauge(
            "millrace_kv_window_blocks_cached",
            "KV blocks of layers with an attention window kept for a later prefix hit",
        )

    def _recoveries(self) -> None:
        self.recoveries = self._family(
            "millrace_recoveries_total", "Times the shards stopped serving", Counter, "reason"
        )
        self.kv_stores_dropped = self._family(
            "millrace_kv_stores_dropped_total",
            "Times KV that outlived its shards was not used",
            Counter,
            "reason",
        )
        self.recovery_seconds = self._duration(
            "millrace_recovery_duration", "Until the shards served again"
        )
        self.recovering = self._gauge("millrace_recovering", "1 while the shards do not serve")
        self.requests_replayed = self._counter(
            "millrace_requests_replayed_total", "Requests that were admitted again after a failure"
        )
        self.tokens_recomputed = self._counter(
            "millrace_tokens_recomputed_total",
            "Tokens that were computed again because a failure lost their KV",
        )
        self.requests_quarantined = self._counter(
            "millrace_requests_quarantined_total",
            "Requests that ended because they break the shards",
        )

    def _adapters(self) -> None:
        counter, duration = self._counter, self._duration
        self.adapter_loads = counter(
            "millrace_adapter_loads_total", "Adapters that the shards loaded"
        )
        self.adapter_load_seconds = duration(
            "millrace_adapter_load_duration_seconds", "Until all shards had loaded an adapter"
        )
        self.adapter_evictions = counter(
            "millrace_adapter_evictions_total", "Adapters that made room for others in the shards"
        )
        self.adapter_waiting_seconds = duration(
            "millrace_adapter_wait_duration_seconds", "Waits of requests for their adapter"
        )
        self.adapter_fetches = self._family(
            "millrace_adapter_fetches_total", "Adapters that were fetched", Counter, "outcome"
        )
        self.adapter_fetched_bytes = counter(
            "millrace_adapter_fetched_bytes_total", "Bytes of adapters that were fetched"
        )
        self.adapters_resident = self._gauge(
            "millrace_adapters_resident", "Adapters in the shards' memory"
        )
        self.adapter_requests = RequestsByAdapter(
            self._family(
                "millrace_adapter_requests_total",
                "Requests by adapter; those after the first hundred names are `other`",
                Counter,
                "adapter",
            )
        )
        self.lora_requests_info = LoraRequestsInfo()
        self.registry.register(self.lora_requests_info)

    def show_recoveries(self) -> None:
        """Show metrics of alerts at zero: to Prometheus a series that begins at 1 has not increased."""
        self.images_decoded.inc(0)
        self.image_tiles_encoded.inc(0)
        for reason in RECOVERY_REASONS:
            self.recoveries.labels(reason=reason).inc(0)
        for reason in DROP_REASONS:
            self.kv_stores_dropped.labels(reason=reason).inc(0)
        self.recovering.set(0)
        self.requests_replayed.inc(0)
        self.tokens_recomputed.inc(0)
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
