"""Dockerfiles and docker-compose.yml against the programs they start and the files they name."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.containers import (
    COMPOSE,
    DEFAULT,
    OURS,
    ROOT,
    command_of,
    dockerfile_of,
    entrypoint,
    environment,
    image,
    instructions,
    stages,
)

from millrace_launcher.settings.arguments import read_settings
from millrace_launcher.supervision.launcher import EXIT_MARGIN_SECONDS
from millrace_router.config import RouterConfig
from millrace_shard.config import ShardConfig

DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))


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
    dockerfile = dockerfile_of(service)
    for name, value in environment(dockerfile).items():
        if name != "PATH":
            monkeypatch.setenv(name, value)
    program = entrypoint(dockerfile)
    PARSERS[program](command_of(service))


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


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_every_copied_file_exists_and_is_in_the_build_context(dockerfile: Path) -> None:
    allowed = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")
    ]
    for word, rest in instructions(dockerfile):
        if word == "COPY" and not rest.startswith("--from"):
            sources = [part for part in rest.split()[:-1] if not part.startswith("--")]
            assert sources
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
        rest.startswith("${PYTHON_IMAGE}") or rest.partition(" ")[0] in stages(dockerfile)
        for word, rest in instructions(dockerfile)
        if word == "FROM"
    )
    assert "org.opencontainers.image.title" in words["LABEL"]
    assert "CMD" in words["HEALTHCHECK"]


def volumes_of(service: dict[str, Any]) -> dict[str, str]:
    """Sources by mount point, with default values of variables."""
    volumes = (DEFAULT.sub(r"\1", volume) for volume in service.get("volumes", []))
    parts = (volume.removesuffix(":ro").rpartition(":") for volume in volumes)
    return {target: source for source, _, target in parts}


def test_every_mounted_file_exists_and_every_volume_is_declared() -> None:
    for service in COMPOSE["services"].values():
        for source in volumes_of(service).values():
            if source.startswith("."):
                assert (ROOT / source).exists(), source
            else:
                assert source in COMPOSE["volumes"]


@pytest.mark.parametrize("service", OURS)
def test_the_model_that_a_command_names_is_mounted(service: str) -> None:
    named = re.findall(r"(?<![\w/])/\w+", " ".join(command_of(service)))
    assert named
    assert set(named) <= volumes_of(OURS[service]).keys()


@pytest.mark.parametrize("service", [name for name in OURS if name != "router"])
def test_compiled_kernels_outlive_the_container(service: str) -> None:
    dockerfile = dockerfile_of(service)
    folder = Path(environment(dockerfile)["MILLRACE_CACHE"])
    assert str(folder.parent) in volumes_of(OURS[service])
    users = [rest for word, rest in image(dockerfile) if word == "USER"]
    assert [OURS[service].get("user", *users)] == ["10001"]
    # A new volume has the owner and the mode that the image's folder has.
    made = " ".join(rest for word, rest in image(dockerfile) if word == "RUN")
    assert f"install --directory --owner=10001 {folder.parent}" in " ".join(made.split())


def test_the_router_image_has_no_torch() -> None:
    text = (ROOT / "deploy" / "docker" / "router.Dockerfile").read_text()
    assert "/wheels ./proto ./router \\\n" in text
    router = tomllib.loads((ROOT / "router" / "pyproject.toml").read_text())["project"]
    assert "torch" not in {re.split("[^a-z-]", line)[0] for line in router["dependencies"]}
    assert "[shard]" not in text


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_files_copied_into_the_image_are_readable_by_its_user(dockerfile: Path) -> None:
    copies = [rest for word, rest in instructions(dockerfile) if word == "COPY"]
    final = copies[next(i for i, rest in enumerate(copies) if "--from" in rest) + 1 :]
    assert final
    assert all(rest.startswith("--chmod=644 ") for rest in final)


@pytest.mark.parametrize("service", ["launcher", "router"])
def test_containers_may_drain_before_they_are_killed(service: str) -> None:
    grace = RouterConfig.model_fields["graceful_termination_timeout"].default
    allowed = int(OURS[service]["stop_grace_period"].removesuffix("s"))
    assert allowed > grace + EXIT_MARGIN_SECONDS
