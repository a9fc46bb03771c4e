"""A real Prometheus scrapes a running server, with our configuration and our dashboard's queries."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from bench.harness.server import RunningServer, free_port

from millrace_testing.contract.tgi_series import SERIES

pytestmark = pytest.mark.ecosystem

ROOT = Path(__file__).parent.parent.parent
CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "millrace.json"
DEADLINE_SECONDS = 60.0
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
        pytest.skip(f"{name} is not installed: make test-ecosystem installs it where it may")
    return path


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def generate(server: RunningServer, num_tokens: int = 4, route: str = "generate") -> Any:
    """Ask for a text; the answer is to be read, or closed."""
    parameters = {"max_new_tokens": num_tokens, "ignore_eos": True}
    body = json.dumps({"inputs": "The mill", "parameters": parameters}).encode()
    request = urllib.request.Request(
        f"{server.url}/{route}", body, {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=60)


def poll(probe: Callable[[], Any], *, what: str) -> Any:
    """The probe's first true answer; fails with `what` past the deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    last: object = None
    while time.monotonic() < deadline:
        try:
            if answer := probe():
                return answer
        except urllib.error.HTTPError as error:
            last = error.code
            error.close()
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            last = error
        time.sleep(0.1)
    pytest.fail(f"{what} within {DEADLINE_SECONDS:.0f} s; last error: {last}")


class Prometheus:
    """Its HTTP API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[Any]:
        """The result vector; fails when the expression is not valid."""
        url = f"{self.url}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        answer = get_json(url)
        assert answer["status"] == "success", answer
        result: list[Any] = answer["data"]["result"]
        return result


@pytest.fixture(scope="module")
def prometheus(
    server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """Our configuration, with the running server in the place of the containers."""
    executable = program("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load(CONFIG.read_text())
    config["global"]["scrape_interval"] = "1s"
    (job,) = config["scrape_configs"]
    del job["dns_sd_configs"]
    job["relabel_configs"][0]["source_labels"] = ["container_name"]
    target = server.url.removeprefix("http://")
    job["static_configs"] = [{"targets": [target], "labels": {"container_name": "launcher"}}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    url = f"127.0.0.1:{free_port()}"
    command = [
        executable,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={url}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            running = Prometheus(f"http://{url}")
            poll(lambda: running.query("vector(1)"), what="Prometheus did not answer")
            yield running
        finally:
            process.terminate()
            process.wait(timeout=30)


def test_it_scrapes_the_server(server: RunningServer, prometheus: Prometheus) -> None:
    generate(server).close()
    up = poll(lambda: prometheus.query("up == 1"), what="the target was not up")
    assert up[0]["metric"]["job"] == "millrace"
    series = poll(lambda: prometheus.query(ALWAYS_THERE), what=f"no {ALWAYS_THERE}")
    assert float(series[0]["value"][1]) >= 1
    assert series[0]["metric"]["container"] == "launcher"


def test_every_query_of_the_dashboard_is_valid(
    server: RunningServer, prometheus: Prometheus
) -> None:
    generate(server).close()
    poll(lambda: prometheus.query(ALWAYS_THERE), what=f"no {ALWAYS_THERE}")
    expressions = [
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


def test_promtool_accepts_the_configuration() -> None:
    subprocess.run([program("promtool"), "check", "config", str(CONFIG)], check=True)


def test_promtool_accepts_the_alerts() -> None:
    rules = CONFIG.with_name("alerts.yml")
    subprocess.run([program("promtool"), "check", "rules", str(rules)], check=True)
