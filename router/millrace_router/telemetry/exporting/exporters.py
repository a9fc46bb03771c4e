"""The exporters of both protocols, and what is logged when a collector does not answer."""

from __future__ import annotations

from collections.abc import Sequence

import structlog
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

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
