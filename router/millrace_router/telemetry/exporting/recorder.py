"""Makes spans of the SDK from what the router tells of a request that has ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator


class _RequestIds(RandomIdGenerator):
    """The ids that the router gave to a request, each once; random ones for all other spans."""

    def __init__(self) -> None:
        self.trace_id: int | None = None
        self.span_id: int | None = None

    def generate_trace_id(self) -> int:
        given, self.trace_id = self.trace_id, None
        return super().generate_trace_id() if given is None else given

    def generate_span_id(self) -> int:
        given, self.span_id = self.span_id, None
        return super().generate_span_id() if given is None else given


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

    def record(self, told: Mapping[str, Any]) -> None:
        """Record a span as `server.traces.request_spans` makes it."""
        parent = self._propagator.extract(told["parent"])
        self._ids.trace_id, self._ids.span_id = int(told["trace_id"], 16), int(told["span_id"], 16)
        span = self._tracer.start_span(
            told["name"],
            context=parent,
            kind=SpanKind.SERVER,
            attributes=told["attributes"],
            start_time=told["start"],
        )
        if told["failed"]:
            span.set_status(Status(StatusCode.ERROR))
        below = set_span_in_context(span)
        for part in told["parts"]:
            child = self._tracer.start_span(
                part["name"],
                context=below,
                attributes=part["attributes"],
                start_time=part["start"],
            )
            child.end(part["end"])
        span.end(told["end"])

    def close(self) -> None:
        """Export what waits."""
        self._provider.shutdown()
