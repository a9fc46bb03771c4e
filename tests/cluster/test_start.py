"""The launcher's child on a cluster that is not there: one sentence and exit code 1, with and without Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from millrace_ray.spec import Spec
from millrace_testing.launcher.deployment import kept_port

HIDING = "import sys; sys.modules['ray'] = None; sys.argv = ['x', sys.argv[1]];"
ABSENT = "there is no Ray cluster at "
LISTENS = "import millrace_ray.__main__ as child; child.check_listening(sys.argv[1])"
SERVE = "import millrace_ray; millrace_ray.app({})"
MAIN = "import millrace_ray.__main__ as child; child.main()"


def refusal(code: str, argument: str, folder: Path, **variables: str) -> str:
    """The sentence of a child that ends with 1."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ended = subprocess.run(
        [sys.executable, "-c", HIDING + code, argument],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    message: str = json.loads(ended.stdout)["fields"]["message"]
    return message


@pytest.fixture
def spec(tmp_path: Path) -> str:
    return Spec(
        num_shard=2,
        shards_per_node=1,
        on_gpus=False,
        cpus_per_shard=1,
        argv=(),
        folder=str(tmp_path),
        timeout_seconds=1.0,
    ).to_json()


def test_without_an_address(spec: str, tmp_path: Path) -> None:
    assert refusal(MAIN, spec, tmp_path).startswith("--cluster ray needs RAY_ADDRESS")


def test_without_ray(spec: str, tmp_path: Path) -> None:
    said = refusal(MAIN, spec, tmp_path, RAY_ADDRESS="127.0.0.1:6379")
    assert said.startswith("Ray is not installed: run `pip install '.[ray]'`")


def test_where_nobody_listens(tmp_path: Path) -> None:
    with kept_port() as port:
        said = refusal(LISTENS, f"127.0.0.1:{port}", tmp_path)
    assert said.startswith(f"{ABSENT}127.0.0.1:{port}: ")


def test_without_ray_serve(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HIDING + SERVE, ""],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    said = "Ray Serve is not installed: run `pip install '.[ray]'` in a checkout, here and on the cluster's hosts"
    assert ended.stderr.splitlines()[-1].endswith(said)
