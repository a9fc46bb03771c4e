"""Our Grafana dashboard and our alerts ask only for metrics that the router has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from millrace_router.telemetry.instruments import Family
from millrace_router.telemetry.metrics import Metrics
from millrace_testing.contract.contract import SERIES

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


def test_tgi_s_dashboard_finds_its_series() -> None:
    assert {NAME.findall(series)[0] for series in SERIES} <= series_names()


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def test_every_metric_of_every_alert_exists() -> None:
    asked = {name for rule in rules() for name in NAME.findall(rule["expr"])}
    assert len(asked) == 9
    assert asked <= series_names()


def test_every_alert_on_one_event_watches_what_is_there_from_the_start() -> None:
    metrics = Metrics(max_input_tokens=10, max_total_tokens=20)
    metrics.show_recoveries()
    shown = {metric.name for metric in metrics.registry.collect()}
    increases = {rule["alert"]: rule["expr"] for rule in rules() if "increase(" in rule["expr"]}
    assert increases.keys() == {"ShardsCrashLoop", "RequestQuarantined"}
    for expression in increases.values():
        assert set(NAME.findall(expression)) <= shown


def test_alerts_ask_for_the_job_of_the_configuration() -> None:
    (job,) = {job["job_name"] for job in PROMETHEUS["scrape_configs"]}
    asked = {found for rule in rules() for found in re.findall(r'job="(\w+)"', rule["expr"])}
    assert asked == {job}


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


def test_the_page_names_nine_metrics_that_exist() -> None:
    asked = [NAME.findall(ask) for _, ask, _ in rows("The nine metrics that matter")]
    assert len(asked) == 9
    assert {name for names in asked for name in names} <= series_names()
    assert all(asked)


def test_the_variable_reads_a_metric_that_exists() -> None:
    (variable,) = DASHBOARD["templating"]["list"]
    assert set(NAME.findall(variable["definition"])) <= series_names()


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for box in [panel["gridPos"]]
        for x in range(box["x"], box["x"] + box["w"])
        for y in range(box["y"], box["y"] + box["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(0 <= x < 24 for x, _ in cells)
