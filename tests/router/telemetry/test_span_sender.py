"""Spans on their way through the exporting process to a collector, and a collector that is down."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from millrace_router.telemetry import span_sender
from millrace_router.telemetry.span_sender import SpanSender
from millrace_testing.router.collector import attributes_of, grpc_collector, http_collector

TRACE, SPAN, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "00f067aa0ba902b7"
COLLECTORS = {"grpc": grpc_collector, "http/protobuf": http_collector}
SECONDS = 60


def settings(endpoint: str, protocol: str) -> dict[str, Any]:
    path = "" if protocol == "grpc" else "/v1/traces"
    return {
        "endpoint": endpoint + path,
        "protocol": protocol,
        "service_name": "mill",
        "json_output": True,
        "log_level": "info",
    }


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
    sender = SpanSender(settings(endpoint, protocol))
    for span in spans:
        sender.send(span)
    await sender.close()
    assert sender.num_lost == 0


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_sender, "CLOSE_SECONDS", float(SECONDS))


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


async def test_unsampled_requests_are_not_exported() -> None:
    with grpc_collector() as collector:
        unsampled = told(parent={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        await sent(collector.url, "grpc", unsampled, told(parts=[]))
    assert len(collector.spans) == 1


@pytest.mark.parametrize("protocol", COLLECTORS)
async def test_a_collector_that_is_down_is_logged_once(
    protocol: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with ExitStack() as stack:
        collector = stack.enter_context(COLLECTORS[protocol]())
        url = collector.url
        stack.close()
        await sent(url, protocol, *[told(parts=[]) for _ in range(3)])
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 1
    assert "traces cannot be exported" in lines[0]


async def test_a_process_that_ends_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_sender, "RESTART_SECONDS", 0.0)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    program = f"import sys; open({str(pipe)!r}, 'w').write(sys.stdin.readline())"
    sender = SpanSender({"a": 1}, command=(sys.executable, "-c", program))
    for _ in range(3):
        text = await asyncio.wait_for(asyncio.to_thread(pipe.read_text), SECONDS)
        assert text == '{"a":1}\n'
    sender._running.cancel()
    await sender.close()


async def test_the_process_gets_no_key_of_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for name in ("API_KEY", "ADMIN_KEY", "OTEL_EXPORTER_OTLP_HEADERS"):
        monkeypatch.setenv(name, "secret")
    program = f"import os; open({str(pipe)!r}, 'w').write(' '.join(os.environ))"
    sender = SpanSender({}, command=(sys.executable, "-c", program))
    names = (await asyncio.wait_for(asyncio.to_thread(pipe.read_text), SECONDS)).split()
    assert {"PATH", "OTEL_EXPORTER_OTLP_HEADERS"} <= set(names)
    assert not {"API_KEY", "ADMIN_KEY"} & set(names)
    sender._running.cancel()
    await sender.close()


async def test_spans_that_do_not_fit_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_sender, "MAX_WAITING_LINES", 2)
    sender = SpanSender({}, command=("/nowhere",))
    for _ in range(5):
        sender.send(told())
    assert (sender.num_lost, len(sender._waiting)) == (3, 2)
    await sender.close()
