"""The values of the Helm chart fit their schema, and its flags are those of the programs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tests.deploy.test_monitoring import series_names

from millrace_launcher.settings import rank_arguments
from millrace_launcher.settings.flags import all_flags, flags_of

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "millrace"
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
PAGE = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()
OF_THE_CHART = {
    "address",
    "cluster",
    "device",
    "first-rank",
    "master-addr",
    "model-id",
    "num-shard",
    "revision",
    "shards-per-node",
    "tls-ca",
    "tls-cert",
    "tls-key",
    "world-size",
}
"""Flags of ranks that other values set, or that make no sense in a pod."""


def values(name: str = "values.yaml") -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((CHART / name).read_text())
    return read


def objects(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The schema, and those in it, that name properties."""
    found = [schema] if "properties" in schema else []
    for part in schema.get("properties", {}).values():
        found += objects(part)
    return found


def test_the_schema_is_one_and_the_defaults_fit() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(values(), SCHEMA)
    assert values().keys() == SCHEMA["properties"].keys() - {"global"}


@pytest.mark.parametrize("name", sorted(path.name for path in (CHART / "ci").iterdir()))
def test_example_values_match_the_schema(name: str) -> None:
    jsonschema.validate(values(f"ci/{name}"), SCHEMA)


def test_unknown_keys_are_refused_at_every_level() -> None:
    assert all("additionalProperties" in schema for schema in objects(SCHEMA))
    for wrong in (
        {"replicaCount": 2},
        {"image": {"registry": "x"}},
        {"autoscaling": {"enabled": True}},
        {"flags": {"--kv-memory": "2G"}},
        {"flags": {"model-id": "other"}},
        {"flags": {"kv-memory": {"value": "2G"}}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, SCHEMA)


def test_the_flags_that_the_chart_sets_are_flags() -> None:
    owned = set(SCHEMA["properties"]["flags"]["propertyNames"]["not"]["enum"])
    flags = {flag.option.removeprefix("--") for flag in all_flags()}
    ranks = flags_of(rank_arguments.OWNERS, rank_arguments.HIDDEN)
    assert owned <= flags | {flag.option.removeprefix("--") for flag in ranks}
    assert owned >= OF_THE_CHART


def test_ranks_get_every_flag_that_they_know() -> None:
    known = flags_of(rank_arguments.OWNERS, rank_arguments.HIDDEN)
    listed = (CHART / "files" / "rank-flags.txt").read_text().split()
    assert sorted(listed) == sorted(
        {flag.option.removeprefix("--") for flag in known} - OF_THE_CHART
    )


def test_the_page_links_to_its_examples() -> None:
    linked = re.findall(r"\]\(\.\./deploy/helm/millrace/(ci/[\w-]+\.yaml)\)", PAGE)
    assert len(linked) == 3
    assert all((CHART / name).is_file() for name in linked)


def test_other_values_of_the_page_match_the_schema() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        jsonschema.validate(yaml.safe_load(block), SCHEMA)


@pytest.mark.parametrize("file", ["files/picker.yaml", "templates/autoscaler.yaml"])
def test_the_chart_names_only_metrics_of_the_router(file: str) -> None:
    named = set(re.findall(r"\bmillrace_\w+", (CHART / file).read_text()))
    assert named
    assert named <= series_names()


def test_the_chart_gives_optional_switches_a_value() -> None:
    listed = re.search(r"has \$name \(list ([^)]*)\)", (CHART / "templates/_pods.tpl").read_text())
    assert listed is not None
    found = {flag.name for flag in all_flags() if flag.field.annotation == bool | None}
    assert set(re.findall(r'"([\w-]+)"', listed[1])) == {name.replace("_", "-") for name in found}
