"""Our Grafana dashboard and our alerts ask only for metrics that the router has."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from millrace_router.telemetry.instruments import Family
from millrace_router.telemetry.metrics import Metrics
from millrace_testing.contract.contract import SERIES
from millrace_testing.launcher.deployment import certificate

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboards/millrace.json").read_text())
PROMETHEUS: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
(RULES,) = (DEPLOY / "prometheus" / name for name in PROMETHEUS["rule_files"])
PAGE = (DEPLOY.parent / "docs" / "monitoring.md").read_text()
PICTURE = (DEPLOY.parent / "docs" / "images" / "dashboard.svg").read_text()
NAME = re.compile(r"\b(?:tgi|millrace)_[a-z_]+")


def series_names() -> set[str]:
    """The names of all series that the router's metrics can show."""
    names: set[str] = set()
    for family in Metrics(max_input_tokens=10, max_total_tokens=20).registry._collector_to_names:
        if not isinstance(family, Family):
            # vLLM's gauge for gateways.
            continue
        (described,) = family.describe()
        suffixes = ("_bucket", "_sum", "_count") if described.type == "histogram" else ("",)
        names.update(described.name + suffix for suffix in suffixes)
    return names


def expressions() -> list[str]:
    return [t["expr"] for panel in DASHBOARD["panels"] for t in panel.get("targets", [])]


def test_every_metric_of_every_panel_exists() -> None:
    asked = {name for expression in expressions() for name in NAME.findall(expression)}
    assert len(asked) > 20
    assert asked <= series_names()


def test_every_series_of_tgi_s_dashboard_exists() -> None:
    assert {NAME.findall(series)[0] for series in SERIES} <= series_names()


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def test_every_metric_of_every_alert_exists() -> None:
    asked = {name for rule in rules() for name in NAME.findall(rule["expr"])}
    assert len(asked) == 9
    assert asked <= series_names()


def test_alerts_on_single_events_use_series_that_exist_from_the_start() -> None:
    metrics = Metrics(max_input_tokens=10, max_total_tokens=20)
    metrics.show_recoveries()
    shown = {metric.name for metric in metrics.registry.collect()}
    increases = {rule["alert"]: rule["expr"] for rule in rules() if "increase(" in rule["expr"]}
    assert increases.keys() == {"ShardsCrashLoop", "RequestQuarantined"}
    for expression in increases.values():
        assert set(NAME.findall(expression)) <= shown


def rows(title: str) -> list[list[str]]:
    """The cells of the first table below a heading of the page, without the table's own headings."""
    chapter = re.split(rf"^##+ {re.escape(title)}$", PAGE, flags=re.MULTILINE)[1]
    (table, *_) = re.findall(r"(?:^\|.*\n)+", chapter, flags=re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


def test_the_page_describes_every_alert() -> None:
    told = {name.strip("`"): severity for name, severity, _ in rows("Alerts")}
    assert told == {rule["alert"]: rule["labels"]["severity"] for rule in rules()}


def test_the_page_has_every_row_and_the_picture_every_panel() -> None:
    panels = DASHBOARD["panels"]
    assert all(f">{panel['title']}<" in PICTURE for panel in panels)
    assert all(panel["description"] for panel in panels if panel["type"] != "row")
    titles = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert [row for row, _ in rows("The dashboard")] == titles


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
