"""Exports the spans of requests with OpenTelemetry's SDK, whose thread sends them to a collector."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from threading import Thread
from typing import Any

import structlog
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from millrace_router.version import VERSION

CLOSE_SECONDS = 5.0
"""For what waits when the router ends."""

log = structlog.get_logger(__name__)


def exporter_to(endpoint: str, protocol: str) -> SpanExporter:
    """Make the exporter for `protocol`, grpc or http/protobuf; it reads further settings from OTEL_ variables."""
    # Each protocol's exporter brings a client library of its own.
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter as GrpcExporter,
        )

        return GrpcExporter(endpoint=endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter as HttpExporter,
    )

    return HttpExporter(endpoint=endpoint)


class SpanExport:
    """Records a request's span and those below it, if the sampler of OTEL_TRACES_SAMPLER takes the request."""

    def __init__(self, endpoint: str, protocol: str, *, service_name: str) -> None:
        """Start the thread."""
        # The SDK logs each attempt; `_LoggingExporter` logs failures once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._ids = _RequestIds()
        resource = Resource.create({SERVICE_NAME: service_name, SERVICE_VERSION: VERSION})
        self._provider = TracerProvider(
            resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        exporter = _LoggingExporter(exporter_to(endpoint, protocol), endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("millrace", VERSION)
        self._propagator = TraceContextTextMapPropagator()

    def send(self, span: Mapping[str, Any]) -> None:
        """Record a span as `server.traces.request_spans` makes it; raises nothing."""
        try:
            self._record(span)
        except Exception:
            log.exception("a span could not be recorded")

    async def close(self) -> None:
        """Export what waits, in at most `CLOSE_SECONDS`."""
        # A thread of its own, for which the end of the process does not wait.
        closing = Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_SECONDS)

    def _record(self, request: Mapping[str, Any]) -> None:
        self._ids.trace_id = int(request["trace_id"], 16)
        self._ids.span_id = int(request["span_id"], 16)
        span = self._tracer.start_span(
            request["name"],
            context=self._propagator.extract(request["parent"]),
            kind=SpanKind.SERVER,
            attributes=request["attributes"],
            start_time=request["start"],
        )
        if request["failed"]:
            span.set_status(Status(StatusCode.ERROR))
        below = set_span_in_context(span)
        for part in request["parts"]:
            child = self._tracer.start_span(
                part["name"],
                context=below,
                attributes=part["attributes"],
                start_time=part["start"],
            )
            child.end(part["end"])
        span.end(request["end"])


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


class _LoggingExporter(SpanExporter):
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
