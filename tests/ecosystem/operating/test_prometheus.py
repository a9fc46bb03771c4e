"""A real Prometheus scrapes a running server, with our configuration and our dashboard's queries."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.harness.server import RunningServer
from tests.ecosystem.operating.prometheus import CONFIG, DASHBOARD, ROOT, Prometheus, poll, scraping

from millrace_testing.contract.contract import SERIES

pytestmark = pytest.mark.ecosystem

PAGE = ROOT / "docs" / "monitoring.md"

KNOWN_COMPLAINTS = (
    'counter metrics should have "_total" suffix',
    'non-histogram and non-summary metrics should not have "_count" suffix',
)
"""TGI's own names, which its dashboards ask for."""
ALWAYS_THERE = "tgi_request_count"
SERIES_LINE = re.compile(r"^(\w+)(?:\{(.*)\})? ", re.MULTILINE)
LABEL = re.compile(r'\w+="[^"]*"')


def program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(
            f"{name} is not installed: make test-all SUITE=ecosystem installs it where it may"
        )
    return path


def generate(server: RunningServer, num_tokens: int = 4, route: str = "generate") -> Any:
    """Ask for a text; the answer is to be read, or closed."""
    parameters = {"max_new_tokens": num_tokens, "ignore_eos": True}
    body = json.dumps({"inputs": "The mill", "parameters": parameters}).encode()
    request = urllib.request.Request(
        f"{server.url}/{route}", body, {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=60)


@pytest.fixture(scope="module")
def prometheus(
    server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    with scraping(server, program("prometheus"), tmp_path_factory.mktemp("prometheus")) as running:
        yield running


def test_it_scrapes_the_server(server: RunningServer, prometheus: Prometheus) -> None:
    generate(server).close()
    up = poll(lambda: prometheus.query("up == 1"), what="the target was not up")
    assert up[0]["metric"]["job"] == "millrace"
    series = poll(lambda: prometheus.query(ALWAYS_THERE), what=f"no {ALWAYS_THERE}")
    assert float(series[0]["value"][1]) >= 1
    assert series[0]["metric"]["container"] == "launcher"


def test_every_query_of_the_dashboard_and_its_page_is_valid(
    server: RunningServer, prometheus: Prometheus
) -> None:
    generate(server).close()
    poll(lambda: prometheus.query(ALWAYS_THERE), what=f"no {ALWAYS_THERE}")
    expressions = re.findall(r"^\| [a-zA-Z ]+ \| `(.*?)` \|", PAGE.read_text(), re.MULTILINE)
    assert len(expressions) == 9
    expressions += [
        target["expr"].replace("$container", ".*").replace("$__rate_interval", "1m")
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel.get("targets", [])
    ]
    assert len(expressions) > 30
    for expression in expressions:
        prometheus.query(expression)


def series_in(exposition: str) -> set[str]:
    """Selectors of the series that there are: the names, with each of their labels, and without."""
    found: set[str] = set()
    for name, labels in SERIES_LINE.findall(exposition):
        found |= {name, *(f"{name}{{{label}}}" for label in LABEL.findall(labels))}
    return found


def test_every_series_that_tgi_s_dashboard_reads_is_there_after_traffic(
    server: RunningServer,
) -> None:
    with generate(server, 200, "generate_stream") as running:
        running.readline()
        generate(server).close()
        running.read()
    with pytest.raises(urllib.error.HTTPError) as refused:
        generate(server, 10**6)
    refused.value.close()
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        there = series_in(answer.read().decode())
    assert [series for series in SERIES if series not in there] == []


def test_promtool_has_only_the_known_complaints(server: RunningServer) -> None:
    promtool = program("promtool")
    generate(server).close()
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        text = answer.read()
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, check=False
    )
    complaints = (checked.stdout + checked.stderr).decode().splitlines()
    unknown = [line for line in complaints if line and not line.endswith(KNOWN_COMPLAINTS)]
    assert unknown == []


def test_promtool_accepts_the_configuration_of_the_page(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "prometheus.yml").write_text(block)
    shutil.copy(CONFIG.with_name("alerts.yml"), tmp_path)
    subprocess.run(
        [program("promtool"), "check", "config", str(tmp_path / "prometheus.yml")], check=True
    )


def test_promtool_accepts_the_configuration() -> None:
    subprocess.run([program("promtool"), "check", "config", str(CONFIG)], check=True)


def test_promtool_accepts_the_alerts() -> None:
    rules = CONFIG.with_name("alerts.yml")
    subprocess.run([program("promtool"), "check", "rules", str(rules)], check=True)
