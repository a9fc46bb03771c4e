"""Logs and traces."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, field_validator

LogLevel = Literal["trace", "debug", "info", "warning", "error"]


class LogFlags(BaseModel):
    """What is logged and traced."""

    otlp_endpoint: str | None = Field(
        default=None,
        description="Collector to export traces of calls to over OTLP, such as http://localhost:4317.",
    )
    otlp_protocol: Literal["grpc", "http/protobuf"] | None = Field(
        default=None,
        description="Protocol of that collector; http/protobuf on port 4318 and grpc on others when absent.",
    )
    otlp_service_name: str | None = Field(
        default=None,
        description="Name of this service in traces; text-generation-inference.server when absent.",
    )
    json_output: bool = Field(default=False, description="Logs as JSON, one object a line.")
    log_level: LogLevel = Field(default="info", description="Least severity that is logged.")
    logger_level: LogLevel | None = Field(
        default=None, description="TGI's name of --log-level, which it beats."
    )

    @property
    def threshold(self) -> LogLevel:
        """The least severity that is logged, by either name."""
        return self.logger_level or self.log_level

    @field_validator("log_level", "logger_level", mode="before")
    @classmethod
    def _narrow_log_level(cls, value: object) -> object:
        return log_level(value)


def log_level(value: object) -> object:
    """Map TGI's level words to ours, and filter directives without a level to info."""
    if not isinstance(value, str):
        return value
    word = value.strip().lower()
    word = {"warn": "warning", "success": "info", "critical": "error"}.get(word, word)
    return word if word in ("trace", "debug", "info", "warning", "error") else "info"
