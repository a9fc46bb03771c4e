"""Starts the export of traces, if the flags ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace_shard.config import ShardConfig

if TYPE_CHECKING:
    from millrace_shard.server.tracing import TracingInterceptor


class TracingError(RuntimeError):
    """Traces are asked for, and OpenTelemetry is not installed."""


def open_tracing(config: ShardConfig) -> TracingInterceptor | None:
    """Make the interceptor of --otlp-endpoint; None without the flag. Raises TracingError."""
    if config.otlp_endpoint is None:
        return None
    try:
        from millrace_shard.server.tracing import interceptor_to  # noqa: PLC0415

        return interceptor_to(config.otlp_endpoint, config)
    except ImportError:
        raise TracingError(
            "--otlp-endpoint needs OpenTelemetry: pip install opentelemetry-sdk"
            " opentelemetry-exporter-otlp-proto-grpc opentelemetry-exporter-otlp-proto-http"
        ) from None
