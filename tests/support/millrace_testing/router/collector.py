"""An OpenTelemetry collector for tests: OTLP over gRPC and over HTTP."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

SECONDS = 60.0


@dataclass
class Collector:
    """Where it listens, and what it has received."""

    url: str = ""
    requests: list[pb.ExportTraceServiceRequest] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, request: pb.ExportTraceServiceRequest) -> None:
        """Keep what arrived."""
        with self.changed:
            self.requests.append(request)
            self.changed.notify_all()

    @property
    def spans(self) -> list[Span]:
        """All spans, in order of arrival."""
        return [
            span
            for request in self.requests
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]

    @property
    def services(self) -> set[str]:
        """The names of the services that sent."""
        return {
            str(attributes_of(of_resource.resource)["service.name"])
            for request in self.requests
            for of_resource in request.resource_spans
        }

    def wait_for(self, is_there: Callable[[list[Span]], bool]) -> list[Span]:
        """The spans, once they are as wanted."""
        with self.changed:
            assert self.changed.wait_for(lambda: is_there(self.spans), SECONDS), self.spans
        return self.spans


def attributes_of(described: Any) -> dict[str, Any]:
    """Attributes of a span or a resource, as Python's values."""
    return {pair.key: _value(pair.value) for pair in described.attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)


class _Service(pb_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        self._collector.take(request)
        return pb.ExportTraceServiceResponse()


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    """A collector that speaks gRPC."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    add: Callable[..., None] = pb_grpc.add_TraceServiceServicer_to_server
    add(_Service(collector), server)
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


@contextmanager
def http_collector() -> Iterator[Collector]:
    """A collector that speaks HTTP, at /v1/traces."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            is_there = self.path == "/v1/traces"
            self.send_response(200 if is_there else 404)
            self.send_header("content-length", "0")
            self.end_headers()
            if is_there:
                text = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
                collector.take(pb.ExportTraceServiceRequest.FromString(text))

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
