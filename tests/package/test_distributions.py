"""The distributions say the same thing: versions, requirements and programs."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from millrace_proto.version import VERSION
from millrace_testing.project import ROOT, project_files

PARTS = ("proto", "router", "shard", "launcher")
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))

TEXTS = (".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".sh", ".tpl", ".Dockerfile", "Makefile")
NAME = r"millrace(?:[-_.](?:server|proto|router|shard|launcher))?"
REQUIREMENT = re.compile(rf"{NAME}(?:\[[\w,-]*\])?(?:[=<>~!].*)?", re.IGNORECASE)
INSTALLER = re.compile(
    r"\b(?:pip3?|pipx|uv|poetry|pdm)\b.*?\b(?:install|add|download|wheel|inject)\b([^`;&|]*)"
)
WITH_EXTRA = re.compile(rf"(?<![\w/.*-]){NAME}\[[a-z][\w,-]*\]", re.IGNORECASE)


def installed_from_an_index(text: str) -> Iterator[str]:
    """Lines that tell people to install a distribution of ours by its name, which on an index may be a stranger's."""
    for line in text.replace("\\\n", " ").splitlines():
        told = INSTALLER.search(line)
        words = re.split(r"[\s`'\"()|;&]+", told[1]) if told else []
        by_name = any(REQUIREMENT.fullmatch(word.rstrip(".,:")) for word in words)
        if by_name or WITH_EXTRA.search(line):
            yield line.strip()


def project(folder: str = ".") -> dict[str, Any]:
    """The project table of a distribution."""
    found: dict[str, Any] = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    return found


def is_ours(line: str) -> bool:
    return canonicalize_name(Requirement(line).name).startswith("millrace-")


def test_the_whole_has_the_dependencies_of_its_parts() -> None:
    needed = {line for part in PARTS for line in project(part)["dependencies"] if not is_ours(line)}
    # Only a router by itself may do without.
    needed |= set(project("router")["optional-dependencies"]["images"])
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
    assert set(own) == {
        "millrace",
        "millrace-simulate",
        "millrace-verify",
        "text-generation-benchmark",
    }


@pytest.mark.parametrize("part", PARTS)
def test_parts_fit_together(part: str) -> None:
    found = project(part)
    assert found["name"] == f"millrace-{part}"
    ours = [line for line in found["dependencies"] if is_ours(line)]
    assert {line.partition("==")[2] for line in ours} <= {VERSION}
    assert found["requires-python"] == project()["requires-python"]
    assert "version" in found["dynamic"]


def test_the_changelog_has_a_section_for_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1] == VERSION


def test_no_file_installs_millrace_from_an_index() -> None:
    own = Path(__file__).relative_to(ROOT)
    told = {
        f"{name}: {line}"
        for name in project_files()
        if name.endswith(TEXTS) and name != str(own)
        for line in installed_from_an_index((ROOT / name).read_text())
    }
    # The extra `dev` of a distribution is the distribution itself with other extras.
    assert told == {'pyproject.toml: "millrace-server[kv-events,otel]",'}


@pytest.mark.parametrize(
    "line",
    [
        "pip install millrace",
        ".venv/bin/pip install -U 'millrace-server[ray]'",
        "`pip install millrace_router==0.1.0`.",
        "uv pip install \\\n  torch millrace",
        "needs `millrace[ray]`",
        'raise Error("run pip install millrace, then")',
        "RUN pip wheel millrace-shard>=0.1",
    ],
)
def test_an_installation_by_name_is_detected(line: str) -> None:
    assert list(installed_from_an_index(line)) != []


@pytest.mark.parametrize(
    "line",
    [
        "pip install '.[ray]'",
        "pip install ./millrace_server-0.1.0-py3-none-any.whl",
        'pip install /wheels/millrace_proto-*.whl "$(echo /wheels/millrace_shard-*.whl)[cuda,otel]"',
        "pip install . && millrace serve",
        "`pip install` of Millrace brings one program, `millrace-launcher`",
        "git clone URL millrace",
        "python -m venv /opt/millrace",
    ],
)
def test_other_installations_are_not_reported(line: str) -> None:
    assert list(installed_from_an_index(line)) == []


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_images_have_the_version(dockerfile: Any) -> None:
    labels = re.findall(r'image\.version="(.*?)"', dockerfile.read_text())
    assert labels == [VERSION]
