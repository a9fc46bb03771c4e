"""Starts the export of traces, if the flags ask for it."""

from __future__ import annotations

from importlib.util import find_spec

from millrace_router.checks import StartupError
from millrace_router.config import RouterConfig
from millrace_router.recovery.shard_status import ShardStatus
from millrace_router.server.traces.request_traces import RequestTraces

MODULES = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
"""The exporter of each protocol."""
PACKAGES = {
    "grpc": "opentelemetry-exporter-otlp-proto-grpc",
    "http/protobuf": "opentelemetry-exporter-otlp-proto-http",
}
"""What brings it; the extra `otel` has all of them."""


def check_traces(config: RouterConfig) -> None:
    """Check that traces could be exported if they are asked for; raises StartupError."""
    target = config.trace_target
    if target is None:
        return
    if target.protocol not in MODULES:
        raise StartupError(f"--otlp-protocol {target.protocol} is not one of {', '.join(MODULES)}")
    if not _is_installed("opentelemetry.sdk.trace") or not _is_installed(MODULES[target.protocol]):
        raise StartupError(
            f"traces over {target.protocol} need OpenTelemetry: pip install opentelemetry-sdk"
            f" {PACKAGES[target.protocol]}, or start without --otlp-endpoint and OTEL_EXPORTER_OTLP_ENDPOINT"
        )


def open_traces(config: RouterConfig, status: ShardStatus) -> RequestTraces | None:
    """Start the export of traces; None if none are asked for."""
    target = config.trace_target
    if target is None:
        return None
    # Only a router that exports traces loads OpenTelemetry.
    from millrace_router.telemetry.span_export import SpanExport  # noqa: PLC0415

    export = SpanExport(target.endpoint, target.protocol, service_name=target.service_name)
    return RequestTraces(export, status, model=config.served_names[0])


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
