"""Reads Dockerfiles and docker-compose.yml without Docker."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
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


def stages(dockerfile: Path) -> dict[str, list[tuple[str, str]]]:
    """Each stage's instructions in order, after those of the stage that it is built from; one without a name is ""."""
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for word, rest in instructions(dockerfile):
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            current = found[name] = list(found.get(base, ()))
        current.append((word, rest))
    return found


def image(dockerfile: Path, target: str | None = None) -> list[tuple[str, str]]:
    """The instructions of a stage, as `--target` names it; of the last one without a name."""
    found = stages(dockerfile)
    return found[target] if target is not None else list(found.values())[-1]


def last(dockerfile: Path, instruction: str) -> str:
    """The arguments of the instruction's last use in the image."""
    return [rest for word, rest in image(dockerfile) if word == instruction][-1]


def environment(dockerfile: Path, target: str | None = None) -> dict[str, str]:
    """The variables that ENV sets in the image."""
    found: dict[str, str] = {}
    for word, rest in image(dockerfile, target):
        if word == "ENV":
            pairs = (part.partition("=") for part in shlex.split(rest))
            found |= {name: value for name, _, value in pairs}
    return found


def entrypoint(dockerfile: Path) -> str:
    """The program that the image runs."""
    (program,) = json.loads(last(dockerfile, "ENTRYPOINT"))
    return str(program)


def health_script(dockerfile: Path) -> Path:
    """The file of this repository that HEALTHCHECK runs."""
    command = json.loads(last(dockerfile, "HEALTHCHECK").partition("CMD ")[2])
    return ROOT / "deploy" / "docker" / Path(command[-1]).name


def dockerfile_of(service: str) -> Path:
    """The Dockerfile of a service."""
    return ROOT / str(OURS[service]["build"]["dockerfile"])


def command_of(service: str) -> list[str]:
    """The arguments of a service, with default values of variables."""
    return [DEFAULT.sub(r"\1", argument) for argument in OURS[service]["command"]]
