"""What Dockerfiles and docker-compose.yml say, read without Docker."""

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


def last(dockerfile: Path, instruction: str) -> str:
    """The arguments of the instruction's last use."""
    return [rest for word, rest in instructions(dockerfile) if word == instruction][-1]


def environment(dockerfile: Path) -> dict[str, str]:
    """What ENV sets in the final stage."""
    pairs = (part.partition("=") for part in shlex.split(last(dockerfile, "ENV")))
    return {name: value for name, _, value in pairs}


def entrypoint(dockerfile: Path) -> str:
    """The program that the image runs."""
    (program,) = json.loads(last(dockerfile, "ENTRYPOINT"))
    return str(program)


def health_script(dockerfile: Path) -> Path:
    """What HEALTHCHECK runs, in this repository."""
    command = json.loads(last(dockerfile, "HEALTHCHECK").partition("CMD ")[2])
    return ROOT / "deploy" / "docker" / Path(command[-1]).name


def dockerfile_of(service: str) -> Path:
    """Where the image of a service of ours is described."""
    return ROOT / str(OURS[service]["build"]["dockerfile"])


def command_of(service: str) -> list[str]:
    """The arguments of a service of ours, variables at their defaults."""
    return [DEFAULT.sub(r"\1", argument) for argument in OURS[service]["command"]]
