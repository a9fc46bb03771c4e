"""Spans on their way to a collector, and a collector that is down."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import structlog
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from millrace_router.telemetry import logs, span_export
from millrace_router.telemetry.span_export import SpanExport
from millrace_testing.router.collector import attributes_of, grpc_collector, http_collector

TRACE, SPAN, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "00f067aa0ba902b7"
COLLECTORS = {"grpc": grpc_collector, "http/protobuf": http_collector}
SECONDS = 60


def told(**changes: Any) -> dict[str, Any]:
    now = time.time_ns()
    part = {"name": "queue", "start": now - 9, "end": now - 5, "attributes": {"n": 1}}
    usual: dict[str, Any] = {
        "trace_id": TRACE,
        "span_id": SPAN,
        "parent": {},
        "name": "POST /generate",
        "start": now - 10,
        "end": now,
        "failed": False,
        "attributes": {"text": "a", "number": 2, "words": ["b", "c"]},
        "parts": [part],
    }
    return usual | changes


async def sent(endpoint: str, protocol: str, *spans: dict[str, Any]) -> None:
    """Send the spans, and close."""
    path = "" if protocol == "grpc" else "/v1/traces"
    export = SpanExport(endpoint + path, protocol, service_name="mill")
    for span in spans:
        export.send(span)
    await export.close()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_export, "CLOSE_SECONDS", float(SECONDS))


@pytest.fixture
def log_file() -> Iterator[io.BytesIO]:
    file = io.BytesIO()
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    logs.configure("info", json_output=True, file=file)
    yield file
    structlog.reset_defaults()
    root.handlers = handlers
    root.setLevel(level)


@pytest.mark.parametrize("protocol", COLLECTORS)
async def test_a_collector_gets_the_spans(protocol: str) -> None:
    first = told()
    with COLLECTORS[protocol]() as collector:
        parent = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}
        second = told(parent=parent, failed=True, span_id="1" * 16, parts=[])
        await sent(collector.url, protocol, first, second)
    assert collector.services == {"mill"}
    by_name = {(span.name, span.span_id.hex()): span for span in collector.spans}
    root, child = by_name["POST /generate", SPAN], by_name[("POST /generate", "1" * 16)]
    (queue,) = [span for span in collector.spans if span.name == "queue"]
    assert (root.trace_id.hex(), root.parent_span_id, root.kind) == (
        TRACE,
        b"",
        Span.SPAN_KIND_SERVER,
    )
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (first["start"], first["end"])
    assert attributes_of(root) == first["attributes"]
    assert (queue.trace_id, queue.parent_span_id) == (root.trace_id, root.span_id)
    assert queue.span_id != root.span_id
    assert queue.end_time_unix_nano - queue.start_time_unix_nano == 4
    assert (child.trace_id.hex(), child.parent_span_id.hex()) == (TRACE, PARENT)
    assert (child.trace_state, child.status.code) == ("a=b", Status.STATUS_CODE_ERROR)


async def test_what_the_client_does_not_sample_is_not_exported() -> None:
    with grpc_collector() as collector:
        unsampled = told(parent={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        await sent(collector.url, "grpc", unsampled, told(parts=[]))
    assert len(collector.spans) == 1


@pytest.mark.parametrize("protocol", COLLECTORS)
async def test_a_collector_that_is_down_is_logged_once(
    protocol: str, log_file: io.BytesIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with ExitStack() as stack:
        collector = stack.enter_context(COLLECTORS[protocol]())
        url = collector.url
        stack.close()
        await sent(url, protocol, *[told(parts=[]) for _ in range(3)])
    lines = log_file.getvalue().decode().splitlines()
    assert len(lines) == 1
    assert "traces cannot be exported" in lines[0]


async def test_a_defect_of_a_span_is_logged_and_raises_nothing(log_file: io.BytesIO) -> None:
    with grpc_collector() as collector:
        await sent(collector.url, "grpc", {"trace_id": "no number"}, told(parts=[]))
    assert b"a span could not be recorded" in log_file.getvalue()
    assert len(collector.spans) == 1
