"""Reads settings and spans from standard input until its end."""

from __future__ import annotations

import logging
import signal
import sys

import orjson

from millrace_router.telemetry import logs
from millrace_router.telemetry.exporting.exporters import LoggingExporter, exporter_to
from millrace_router.telemetry.exporting.recorder import SpanRecorder
from millrace_router.version import VERSION


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


if __name__ == "__main__":
    main()
