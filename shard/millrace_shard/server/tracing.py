"""Spans of the calls that prepare steps, exported over OTLP with OpenTelemetry's SDK.

The module is imported only if traces are requested. A stream of steps does not get a span: a step serves many requests,
whose prefill and decode are spans of the router.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import grpc
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from millrace_shard.config import ShardConfig

SERVICE = "text-generation-inference.server"
"""TGI's default."""
TRACED = frozenset({"Warmup", "CompileGrammar", "LoadAdapter", "UnloadAdapter"})
CLOSE_SECONDS = 2.0

logger = logging.getLogger(__name__)


class TracingInterceptor(grpc.ServerInterceptor):
    """Makes a span of each call in `TRACED`, below the span of the router that its metadata name."""

    def __init__(self, exporter: SpanExporter, *, service_name: str, rank: int) -> None:
        resource = Resource.create({SERVICE_NAME: service_name, "millrace.rank": rank})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("millrace")
        self._propagator = TraceContextTextMapPropagator()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the handler of a traced call; others stay as they are."""
        handler = continuation(handler_call_details)
        service, _, method = handler_call_details.method.strip("/").partition("/")
        if handler is None or handler.unary_unary is None or method not in TRACED:
            return handler
        answer = handler.unary_unary
        metadata = handler_call_details.invocation_metadata or ()
        parent = self._propagator.extract({key: str(value) for key, value in metadata})
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}

        def traced(request: Any, context: grpc.ServicerContext) -> Any:  # noqa: ANN401
            with self._tracer.start_as_current_span(
                method,
                context=parent,
                kind=SpanKind.SERVER,
                attributes=attributes,
                # Messages may quote grammars.
                record_exception=False,
                set_status_on_exception=False,
            ) as span:
                try:
                    return answer(request, context)
                except Exception:
                    span.set_status(StatusCode.ERROR)
                    raise

        return grpc.unary_unary_rpc_method_handler(
            traced,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def close(self) -> None:
        """Export what waits, for `CLOSE_SECONDS` at most."""
        closing = Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


class LoggingExporter(SpanExporter):
    """Logs the first of several failures."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export the spans; they are lost if that fails."""
        result = self._exporter.export(spans)
        has_failed = result is not SpanExportResult.SUCCESS
        if has_failed and not self._is_failing:
            logger.error("traces cannot be exported to %s", self._endpoint)
        self._is_failing = has_failed
        return result

    def shutdown(self) -> None:
        """End; an export that waits for another attempt is given up."""
        self._exporter.shutdown()


def interceptor_to(endpoint: str, config: ShardConfig) -> TracingInterceptor:
    """Make the interceptor that exports to `endpoint`; raises ImportError without the exporter of its protocol."""
    # The SDK logs each attempt; `LoggingExporter` logs failures once.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    exporter = LoggingExporter(_exporter(endpoint, config.otlp_protocol), endpoint)
    name = config.otlp_service_name or SERVICE
    return TracingInterceptor(exporter, service_name=name, rank=config.rank)


def _exporter(endpoint: str, protocol: str | None) -> SpanExporter:
    parts = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
    # Each protocol's exporter brings its own client library.
    if (protocol or "") == "grpc" or (protocol is None and not parts.netloc.endswith(":4318")):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter as GrpcExporter,
        )

        return GrpcExporter(endpoint=endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter as HttpExporter,
    )

    has_path = parts.path not in {"", "/"}
    return HttpExporter(endpoint=endpoint if has_path else f"{endpoint.rstrip('/')}/v1/traces")
