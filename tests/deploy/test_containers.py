"""Dockerfiles and docker-compose.yml against the programs they start and the files they name."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace_launcher.arguments import read_settings
from millrace_router.config import RouterConfig
from millrace_shard.config import ShardConfig

ROOT = Path(__file__).parent.parent.parent
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OURS = {name: value for name, value in COMPOSE["services"].items() if "build" in value}
DEFAULT = re.compile(r"\$\{\w+:-([^}]*)\}")


def instructions(dockerfile: Path) -> Iterator[tuple[str, str]]:
    """(instruction, arguments) in order, continuation lines joined, comments left out."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            word, _, rest = line.partition(" ")
            yield word, rest.strip()


def last(dockerfile: Path, instruction: str) -> str:
    """The arguments of the instruction's last use."""
    return [rest for word, rest in instructions(dockerfile) if word == instruction][-1]


def environment(dockerfile: Path) -> dict[str, str]:
    """What ENV sets in the final stage."""
    pairs = (part.partition("=") for part in shlex.split(last(dockerfile, "ENV")))
    return {name: value for name, _, value in pairs}


def shard_from_args(arguments: list[str]) -> object:
    assert arguments[0] == "serve"
    return ShardConfig.from_args(arguments[1:])


PARSERS: dict[str, Callable[[list[str]], object]] = {
    "millrace-launcher": read_settings,
    "millrace-router": RouterConfig.from_args,
    "millrace-shard": shard_from_args,
}


@pytest.mark.parametrize("service", OURS)
def test_every_command_is_one_our_program_takes(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dockerfile = ROOT / OURS[service]["build"]["dockerfile"]
    for name, value in environment(dockerfile).items():
        if name != "PATH":
            monkeypatch.setenv(name, value)
    (program,) = json.loads(last(dockerfile, "ENTRYPOINT"))
    command = [DEFAULT.sub(r"\1", argument) for argument in OURS[service]["command"]]
    PARSERS[program](command)


def test_the_split_profile_joins_its_parts() -> None:
    shards = {
        name: ShardConfig.from_args(service["command"][1:])
        for name, service in OURS.items()
        if name.startswith("shard")
    }
    router = RouterConfig.from_args(OURS["router"]["command"])
    assert router.shard_addresses == tuple(f"{name}:50051" for name in shards)
    assert [shard.rank for shard in shards.values()] == list(range(len(shards)))
    assert {shard.world_size for shard in shards.values()} == {len(shards)}
    assert {shard.master_addr for shard in shards.values()} == {"shard-0"}
    assert {shard.address for shard in shards.values()} == {"0.0.0.0:50051"}


def test_services_by_profile() -> None:
    profiles = {name: service.get("profiles", []) for name, service in COMPOSE["services"].items()}
    assert [name for name, wanted in profiles.items() if not wanted] == ["launcher"]
    split = [name for name, wanted in profiles.items() if wanted == ["split"]]
    assert split == ["router", "shard-0", "shard-1"]
    assert all(set(OURS["router"]["depends_on"]) >= {name} for name in split[1:])


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_every_copied_file_exists_and_is_in_the_build_context(dockerfile: Path) -> None:
    allowed = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")
    ]
    for word, rest in instructions(dockerfile):
        if word == "COPY" and not rest.startswith("--from"):
            *sources, _ = rest.split()
            for source in sources:
                assert (ROOT / source).exists(), source
                assert any(
                    fnmatch(source, entry) or source.startswith(f"{entry}/") for entry in allowed
                )


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_every_image_is_pinned_labelled_and_checked(dockerfile: Path) -> None:
    words = dict(instructions(dockerfile))
    assert re.fullmatch(
        r"PYTHON_IMAGE=python:\d+\.\d+\.\d+-slim-bookworm|TORCH_INDEX=\"\"", words["ARG"]
    )
    assert all(
        rest.startswith("${PYTHON_IMAGE}")
        for word, rest in instructions(dockerfile)
        if word == "FROM"
    )
    assert "org.opencontainers.image.title" in words["LABEL"]
    assert "CMD" in words["HEALTHCHECK"]


@pytest.mark.parametrize("service", set(COMPOSE["services"]) - set(OURS))
def test_every_foreign_image_is_pinned(service: str) -> None:
    assert re.search(r":v?\d+\.\d+\.\d+$", COMPOSE["services"][service]["image"])


def test_every_mounted_file_exists() -> None:
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", []):
            source = DEFAULT.sub(r"\1", volume).split(":")[0]
            if source.startswith("."):
                assert (ROOT / source).exists(), source


def test_the_router_image_has_no_torch() -> None:
    text = (ROOT / "deploy" / "docker" / "router.Dockerfile").read_text()
    assert "[router]" in text
    assert "[shard]" not in text
