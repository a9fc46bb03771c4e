"""Renders the Helm chart, and runs the commands of its containers as Kubernetes would."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.ecosystem import prepare

CHART = prepare.ROOT / "deploy" / "helm" / "millrace"
RELEASE, NAMESPACE = "millrace", "llm"
SCHEMAS = prepare.CLIENTS / "helm"
PROGRAM = "#!/bin/sh\nprintf '%s\\0' \"$@\"\n"
"""Prints its arguments."""
REFERENCE = re.compile(r"\$(\$|\(([^)]*)\))")
Object = dict[str, Any]


def shapes() -> dict[str, Object]:
    """The values of each example by name."""
    files = sorted((CHART / "ci").glob("*-values.yaml"))
    return {
        file.name.removesuffix("-values.yaml"): yaml.safe_load(file.read_text()) for file in files
    }


def rendered(values: Sequence[Object]) -> list[Object]:
    """What Helm says of each of the values; see `clients/helm/chart.py`."""
    python = prepare.interpreter("helm")
    if python is None:
        pytest.skip("no environment for helm: make test-all SUITE=ecosystem makes it")
    program = [str(python), str(SCHEMAS / "chart.py"), str(CHART), RELEASE, NAMESPACE]
    answer = subprocess.run(
        program, input=json.dumps(values), capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    found: list[Object] = json.loads(answer.stdout)
    return found


@dataclass(frozen=True, slots=True)
class Pod:
    """A template of pods, and the index in its group that LeaderWorkerSet tells a pod; None elsewhere."""

    template: Object
    index: int | None

    @property
    def spec(self) -> Object:
        """Its specification."""
        found: Object = self.template["spec"]
        return found

    @property
    def container(self) -> Object:
        """The one container."""
        (found,) = self.spec["containers"]
        return dict(found)

    @property
    def environment(self) -> dict[str, str]:
        """Variables with a value of their own, and those of LeaderWorkerSet."""
        named = {one["name"]: one["value"] for one in self.container["env"] if "value" in one}
        if self.index is None:
            return named
        return {
            "LWS_LEADER_ADDRESS": f"{RELEASE}-0.{RELEASE}.{NAMESPACE}",
            "LWS_WORKER_INDEX": str(self.index),
            **named,
        }

    def arguments(self, folder: Path) -> list[str]:
        """What `millrace-launcher` is called with; a program of that name is made in the folder."""
        variables = self.environment
        expanded = [_expand(text, variables) for text in self.container["args"]]
        if "command" not in self.container:
            return expanded
        command = [_expand(text, variables) for text in self.container["command"]]
        program = folder / "millrace-launcher"
        program.write_text(PROGRAM)
        program.chmod(0o755)
        path = f"{folder}:/usr/bin:/bin"
        shell = subprocess.run(
            [*command, *expanded],
            env={**variables, "PATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        return shell.stdout.split("\0")[:-1]


def pods(objects: Sequence[Object]) -> Iterator[Pod]:
    """The pods of a replica, the one with the HTTP port first."""
    for one in objects:
        if one["kind"] == "Deployment":
            yield Pod(one["spec"]["template"], None)
        if one["kind"] == "LeaderWorkerSet":
            group = one["spec"]["leaderWorkerTemplate"]
            yield Pod(group["leaderTemplate"], 0)
            for index in range(1, group["size"]):
                yield Pod(group["workerTemplate"], index)


def _expand(text: str, variables: dict[str, str]) -> str:
    """`$(NAME)` by its value; a name that is unknown stays, and `$$` is one dollar sign."""

    def replaced(match: re.Match[str]) -> str:
        return "$" if match[1] == "$" else variables.get(match[2], match[0])

    return REFERENCE.sub(replaced, text)
