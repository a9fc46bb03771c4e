"""The process that exports traces: reads settings and spans from standard input until its end."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import structlog
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from millrace_router.telemetry import logs
from millrace_router.version import VERSION

log = structlog.get_logger(__name__)


def main() -> None:
    """Export until the router closes the pipe."""
    # The router drains first, and its last spans come after a signal to all of its group.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lines = sys.stdin.buffer
    first = lines.readline()
    if not first:
        return
    settings = orjson.loads(first)
    logs.configure(settings["log_level"], json_output=settings["json_output"])
    # The SDK logs each attempt; `LoggingExporter` logs failures once.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    exporter = exporter_to(settings["endpoint"], settings["protocol"])
    recorder = SpanRecorder(
        LoggingExporter(exporter, settings["endpoint"]),
        service_name=settings["service_name"],
        version=VERSION,
    )
    for line in lines:
        recorder.record(orjson.loads(line))
    recorder.close()


class SpanRecorder:
    """Records a request's span and those below it, if the sampler of OTEL_TRACES_SAMPLER takes the request."""

    def __init__(self, exporter: SpanExporter, *, service_name: str, version: str) -> None:
        self._ids = _RequestIds()
        resource = Resource.create({SERVICE_NAME: service_name, SERVICE_VERSION: version})
        self._provider = TracerProvider(
            resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("millrace", version)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, span_json: Mapping[str, Any]) -> None:
        """Record a span as `server.traces.request_spans` makes it."""
        parent = self._propagator.extract(span_json["parent"])
        self._ids.trace_id, self._ids.span_id = (
            int(span_json["trace_id"], 16),
            int(span_json["span_id"], 16),
        )
        span = self._tracer.start_span(
            span_json["name"],
            context=parent,
            kind=SpanKind.SERVER,
            attributes=span_json["attributes"],
            start_time=span_json["start"],
        )
        if span_json["failed"]:
            span.set_status(Status(StatusCode.ERROR))
        below = set_span_in_context(span)
        for part in span_json["parts"]:
            child = self._tracer.start_span(
                part["name"],
                context=below,
                attributes=part["attributes"],
                start_time=part["start"],
            )
            child.end(part["end"])
        span.end(span_json["end"])

    def close(self) -> None:
        self._provider.shutdown()


class _RequestIds(RandomIdGenerator):
    """The ids that the router gave to a request, each once; random ones for all other spans."""

    def __init__(self) -> None:
        self.trace_id: int | None = None
        self.span_id: int | None = None

    def generate_trace_id(self) -> int:
        chosen, self.trace_id = self.trace_id, None
        return super().generate_trace_id() if chosen is None else chosen

    def generate_span_id(self) -> int:
        chosen, self.span_id = self.span_id, None
        return super().generate_span_id() if chosen is None else chosen


class LoggingExporter(SpanExporter):
    """Logs the first of several failures, and the end of them."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._num_lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export the spans; they are lost if that fails."""
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._num_lost:
                log.info("traces are exported again", num_lost=self._num_lost)
            self._num_lost = 0
            return result
        if not self._num_lost:
            log.error("traces cannot be exported", endpoint=self._endpoint)
        self._num_lost += len(spans)
        return result

    def shutdown(self) -> None:
        """End; an export that waits for another attempt is given up."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Wait for what the exporter has taken."""
        return self._exporter.force_flush(timeout_millis)


def exporter_to(endpoint: str, protocol: str) -> SpanExporter:
    """Make the exporter for `protocol`, grpc or http/protobuf; it reads further settings from OTEL_ variables."""
    # Each protocol's exporter brings its own client library.
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter as GrpcExporter,
        )

        return GrpcExporter(endpoint=endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter as HttpExporter,
    )

    return HttpExporter(endpoint=endpoint)


if __name__ == "__main__":
    main()
