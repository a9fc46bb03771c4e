"""A Prometheus with this project's configuration, in front of a running server."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from bench.harness.server import RunningServer, free_port

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "millrace.json"
DEADLINE_SECONDS = 60.0


def get_json(url: str) -> Any:
    """The answer's object."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


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
    raise AssertionError(f"{what} within {DEADLINE_SECONDS:.0f} s; last error: {last}")


class Prometheus:
    """Its HTTP API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[Any]:
        """The result vector; fails when the expression is not valid."""
        return self._get("query", query=expression)

    def _get(self, route: str, **parameters: str | float) -> list[Any]:
        answer = get_json(f"{self.url}/api/v1/{route}?" + urllib.parse.urlencode(parameters))
        assert answer["status"] == "success", answer
        result: list[Any] = answer["data"]["result"]
        return result


@contextmanager
def scraping(server: RunningServer, executable: str, folder: Path) -> Iterator[Prometheus]:
    """Our configuration, with the running server in the place of the containers."""
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
