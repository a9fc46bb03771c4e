"""A real Prometheus scrapes a running server, with our configuration and our dashboard's queries."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
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


def test_prometheus_scrapes_the_server(server: RunningServer, prometheus: Prometheus) -> None:
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


RULES = Path(__file__).parents[3] / "deploy" / "prometheus" / "alerts.yml"
GROUPS = yaml.safe_load(RULES.read_text())["groups"]
ALERTS: dict[str, Any] = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
TARGET = 'instance="a:80", job="millrace"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Samples of a server, one a minute from minute 0, and whether an alert fires at `minute`."""

    alert: str
    name: str
    series: Mapping[str, str]
    """promtool's notation by name and labels; `0+6x30` is 0, 6, …, 180."""
    minute: int = 30
    summary: str | None = None
    """None: it does not fire."""
    labels: Mapping[str, str] = field(
        default_factory=lambda: {"instance": "a:80", "job": "millrace"}
    )

    def __str__(self) -> str:
        return f"{self.alert}-{self.name}"

    def document(self) -> dict[str, Any]:
        """promtool's file."""
        rule = ALERTS[self.alert]
        fired = {
            "exp_labels": {**rule["labels"], **self.labels},
            "exp_annotations": {**rule["annotations"], "summary": self.summary},
        }
        test = {
            "interval": "1m",
            "input_series": [
                {"series": f"{name[:-1]}, {TARGET}}}" if "{" in name else f"{name}{{{TARGET}}}"}
                | {"values": values}
                for name, values in self.series.items()
            ],
            "alert_rule_test": [
                {
                    "eval_time": f"{self.minute}m",
                    "alertname": self.alert,
                    "exp_alerts": [] if self.summary is None else [fired],
                }
            ],
        }
        return {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}


def refusals(share: float, err: str = "overloaded") -> dict[str, str]:
    """A hundred requests a minute, of which a share fails."""
    return {
        "tgi_request_count": "0+100x30",
        f'tgi_request_failure{{err="{err}"}}': f"0+{share * 100:g}x30",
    }


def first_tokens(quick: int, slow: int) -> dict[str, str]:
    """Requests a minute with a first token in 1 to 2 s, and others in 8 to 16 s."""
    buckets = {"1": 0, "2": quick, "8": quick, "16": quick + slow, "+Inf": quick + slow}
    name = "millrace_time_to_first_token_seconds_bucket"
    return {f'{name}{{le="{bound}"}}': f"0+{count}x30" for bound, count in buckets.items()}


def blocks(in_use: int) -> dict[str, str]:
    """A cache of a thousand blocks."""
    return {"millrace_kv_blocks": "1000x30", "millrace_kv_blocks_in_use": f"{in_use}x30"}


def recoveries(reason: str, values: str) -> dict[str, str]:
    """Failures of the shards."""
    return {f'millrace_recoveries_total{{reason="{reason}"}}': values}


CASES = [
    Case(
        alert="ServerDown",
        name="fires when a server stops answering",
        series={"up": "1x9 0x20"},
        minute=12,
        summary="a:80 has not answered for a minute.",
    ),
    Case(alert="ServerDown", name="waits a minute", series={"up": "1x9 0x20"}, minute=10),
    Case(alert="ServerDown", name="is silent", series={"up": "1x30"}),
    Case(
        alert="ServerDown",
        name="fires when no server is found",
        series={},
        minute=2,
        summary="Every server has not answered for a minute.",
        labels={"job": "millrace"},
    ),
    Case(
        alert="QueueGrowing",
        name="fires",
        series={"millrace_requests_waiting": "0+2x30"},
        summary="a:80 gets more requests than it answers: its queue grows.",
    ),
    Case(
        alert="QueueGrowing",
        name="is silent while it shrinks",
        series={"millrace_requests_waiting": "90-2x30"},
    ),
    Case(
        alert="QueueGrowing",
        name="is silent when it was empty",
        series={"millrace_requests_waiting": "0x20 0 1 2 3 4 5 6 7 8 9"},
        minute=30,
    ),
    Case(
        alert="RequestsRefused",
        name="fires",
        series=refusals(0.06),
        summary="a:80 answers 6% of its requests with 429.",
    ),
    Case(alert="RequestsRefused", name="is silent at 4 %", series=refusals(0.04)),
    Case(
        alert="RequestsRefused",
        name="is silent about other errors",
        series=refusals(0.5, "validation"),
    ),
    *(
        Case(
            alert="RequestsFailing",
            name=f"fires on {what}",
            series=refusals(0.02, err),
            summary="a:80 fails 2% of its requests.",
        )
        for what, err in (
            ("failed steps", "generation"),
            ("cut answers", "incomplete"),
            ("defects", "internal"),
        )
    ),
    *(
        Case(alert="RequestsFailing", name=f"is silent about {what}", series=refusals(0.5, err))
        for what, err in (("errors of clients", "validation"), ("clients that leave", "dropped"))
    ),
    Case(alert="RequestsFailing", name="is silent at a few", series=refusals(0.009, "generation")),
    Case(
        alert="KvCacheFull",
        name="fires",
        series=blocks(960),
        summary="Running requests hold 96% of the KV cache of a:80.",
    ),
    Case(alert="KvCacheFull", name="is silent", series=blocks(940)),
    Case(
        alert="SlowFirstToken",
        name="fires",
        series=first_tokens(90, 10),
        summary="One request in twenty to a:80 waits 12s for its first token.",
    ),
    Case(alert="SlowFirstToken", name="is silent about a few", series=first_tokens(96, 4)),
    Case(
        alert="ShardsRecovering",
        name="fires",
        series={"millrace_recovering": "0x10 1x20"},
        minute=14,
        summary="The shards of a:80 have not served for two minutes.",
    ),
    Case(
        alert="ShardsRecovering",
        name="waits two minutes",
        series={"millrace_recovering": "0x10 1x20"},
        minute=12,
    ),
    Case(
        alert="ShardsCrashLoop",
        name="fires",
        series=recoveries("lost", "0+1x30"),
        summary="The shards of a:80 failed more than five times in ten minutes.",
    ),
    Case(
        alert="ShardsCrashLoop",
        name="is silent about planned restarts",
        series=recoveries("planned", "0+1x30"),
    ),
    Case(
        alert="RequestQuarantined",
        name="fires",
        series={"millrace_requests_quarantined_total": "0x25 1x5"},
        summary="a:80 refused a request that breaks its shards.",
    ),
    Case(
        alert="RequestQuarantined",
        name="is silent",
        series={"millrace_requests_quarantined_total": "1x30"},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_alert_fires_as_its_case_expects(case: Case, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip(
            "promtool is not installed: make test-all SUITE=ecosystem installs it where it may"
        )
    file = tmp_path / "rules_test.yml"
    file.write_text(yaml.safe_dump(case.document()))
    answer = subprocess.run(
        [promtool, "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    for fires in (True, False):
        assert {case.alert for case in CASES if (case.summary is not None) is fires} == set(ALERTS)
