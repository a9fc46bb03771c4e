"""Where traces go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

SERVICE_NAME = "text-generation-inference.router"
"""TGI's name of this service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTarget:
    """The collector of traces."""

    endpoint: str
    """With the path of traces, if the protocol is http/protobuf."""
    protocol: str
    """grpc or http/protobuf."""
    service_name: str


def trace_target(
    endpoint: str | None, protocol: str | None, service_name: str, environ: Mapping[str, str]
) -> TraceTarget | None:
    """Return where traces go, by the values of the flags and, where they are absent, by OpenTelemetry's variables."""

    def variable(name: str) -> str:
        """Return the variable for traces, or else the one for all signals."""
        prefixes = ("OTEL_EXPORTER_OTLP_TRACES_", "OTEL_EXPORTER_OTLP_")
        return next((value for prefix in prefixes if (value := environ.get(prefix + name))), "")

    is_off = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if endpoint is None and environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        is_off = True
    address = endpoint or variable("ENDPOINT")
    if is_off or not address:
        return None
    parts = urlsplit(address if "://" in address else f"//{address}")
    usual = "http/protobuf" if parts.netloc.endswith(":4318") else "grpc"
    protocol = protocol or variable("PROTOCOL") or usual
    is_whole = endpoint is None and "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" in environ
    if protocol != "grpc" and not is_whole and not parts.path.endswith("/v1/traces"):
        address = f"{address.rstrip('/')}/v1/traces"
    is_usual = service_name == SERVICE_NAME
    name = environ.get("OTEL_SERVICE_NAME") if is_usual else None
    return TraceTarget(endpoint=address, protocol=protocol, service_name=name or service_name)
