"""Logs, traces, and the end of the process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, field_validator

from millrace_router.config.traces import SERVICE_NAME, TraceTarget, trace_target
from millrace_router.config.values import LogLevel, log_level


class LogFlags(BaseModel):
    """What is logged and traced, and TGI's flags without effect."""

    graceful_termination_timeout: int = Field(
        default=90, ge=0, description="Seconds that running requests get after SIGTERM."
    )
    drain_delay: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds after SIGTERM in which new requests are still served while /readyz says 503, so that load"
        " balancers learn of it; then the server drains.",
    )
    json_output: bool = Field(default=False, description="Logs as JSON, one object a line.")
    log_level: LogLevel = Field(default="info", description="Least severity that is logged.")
    log_requests: Path | None = Field(
        default=None,
        description="File for the log's line of each request, as JSON; it is created for this user alone.",
    )
    log_requests_max_bytes: int = Field(
        default=100 << 20,
        ge=0,
        description="Bytes after which that file is set aside as PATH.1 and so on; five are kept. 0: never.",
    )
    otlp_endpoint: str | None = Field(
        default=None,
        description="Collector to export traces to over OTLP, such as http://localhost:4317;"
        " OTEL_EXPORTER_OTLP_ENDPOINT when absent.",
    )
    otlp_protocol: Literal["grpc", "http/protobuf"] | None = Field(
        default=None,
        description="Protocol of that collector; OTEL_EXPORTER_OTLP_PROTOCOL when absent, else http/protobuf on port"
        " 4318 and grpc on others.",
    )
    otlp_service_name: str = Field(
        default=SERVICE_NAME,
        description="Name of this service in traces; OTEL_SERVICE_NAME beats the default.",
    )
    usage_stats: Literal["on", "off", "no-stack"] = Field(
        default="on", description="No effect: no usage statistics are ever sent."
    )
    ngrok: bool = Field(default=False, description="Refused: tunnels are not supported.")
    ngrok_authtoken: str | None = Field(default=None, description="No effect without --ngrok.")
    ngrok_edge: str | None = Field(default=None, description="No effect without --ngrok.")

    @property
    def trace_target(self) -> TraceTarget | None:
        """Where traces go, by the flags and by OpenTelemetry's variables; None for nowhere."""
        return trace_target(
            self.otlp_endpoint, self.otlp_protocol, self.otlp_service_name, os.environ
        )

    @field_validator("log_level", mode="before")
    @classmethod
    def _narrow_log_level(cls, value: object) -> object:
        return log_level(value)
