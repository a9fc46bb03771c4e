"""The containers' health checks, run as the images run them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from millrace_testing.launcher.deployment import certificate

SCRIPTS = Path(__file__).parent.parent.parent / "deploy" / "docker"


def status(script: str, **environment: str) -> int:
    """The exit status of a health check; whatever is printed is shown."""
    command = [sys.executable, str(SCRIPTS / script)]
    return subprocess.run(command, env={**os.environ, **environment}, check=False).returncode


class Answer(BaseHTTPRequestHandler):
    """A server whose /health answers 200, or 503 if it is not healthy."""

    def do_GET(self) -> None:
        well = self.path == "/health" and getattr(self.server, "well", True)
        self.send_response(200 if well else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Do not log."""


@pytest.fixture
def http_server() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_http_health_follows_the_answer(http_server: HTTPServer) -> None:
    port = str(http_server.server_port)
    assert status("http_health.py", PORT=port) == 0
    http_server.well = False  # type: ignore[attr-defined]
    assert status("http_health.py", PORT=port) == 1


def test_shard_health_follows_the_standard_service() -> None:
    states = health.HealthServicer()
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    address = f"0.0.0.0:{port}"
    try:
        states.set("", health_pb2.HealthCheckResponse.SERVING)
        assert status("shard_health.py", ADDRESS=address) == 0
        states.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert status("shard_health.py", ADDRESS=address) == 1
    finally:
        server.stop(grace=None).wait()
    assert status("shard_health.py", ADDRESS=address) == 1


def test_shard_health_has_the_shard_s_papers(tmp_path: Path) -> None:
    files = certificate(tmp_path, "shard", "shard-0", "localhost")
    credentials = grpc.ssl_server_credentials(
        [(files.key.read_bytes(), files.cert.read_bytes())],
        root_certificates=files.ca.read_bytes(),
        require_client_auth=True,
    )
    states = health.HealthServicer()
    states.set("", health_pb2.HealthCheckResponse.SERVING)
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    address = f"0.0.0.0:{server.add_secure_port('localhost:0', credentials)}"
    papers = {"TLS_CERT": str(files.cert), "TLS_KEY": str(files.key), "TLS_CA": str(files.ca)}
    server.start()
    try:
        assert status("shard_health.py", ADDRESS=address, **papers) == 0
        assert status("shard_health.py", ADDRESS=address) == 1
    finally:
        server.stop(grace=None).wait()
