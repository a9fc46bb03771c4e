"""The distributions say the same thing: versions, requirements and programs."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from millrace_proto.version import VERSION
from millrace_testing.project import ROOT

PARTS = ("proto", "router", "shard", "launcher")
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))


def project(folder: str = ".") -> dict[str, Any]:
    """The project table of a distribution."""
    found: dict[str, Any] = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    return found


def is_ours(line: str) -> bool:
    return canonicalize_name(Requirement(line).name).startswith("millrace-")


def test_the_whole_needs_what_its_parts_need() -> None:
    needed = {line for part in PARTS for line in project(part)["dependencies"] if not is_ours(line)}
    assert set(project()["dependencies"]) == needed
    assert (
        project()["optional-dependencies"]["cuda"]
        == (project("shard")["optional-dependencies"]["cuda"])
    )


def test_the_whole_has_every_program_of_its_parts() -> None:
    programs: dict[str, str] = {}
    for part in PARTS:
        programs |= project(part).get("scripts", {})
    own = {name: place for name, place in project()["scripts"].items() if name not in programs}
    assert {**programs, **own} == project()["scripts"]
    assert set(own) == {"millrace", "millrace-simulate", "text-generation-benchmark"}


@pytest.mark.parametrize("part", PARTS)
def test_parts_fit_together(part: str) -> None:
    found = project(part)
    assert found["name"] == f"millrace-{part}"
    ours = [line for line in found["dependencies"] if is_ours(line)]
    assert {line.partition("==")[2] for line in ours} <= {VERSION}
    assert found["requires-python"] == project()["requires-python"]
    assert "version" in found["dynamic"]


def test_the_changelog_tells_of_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1] == VERSION


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_images_have_the_version(dockerfile: Any) -> None:
    labels = re.findall(r'image\.version="(.*?)"', dockerfile.read_text())
    assert labels == [VERSION]
