"""The launcher's child on a cluster that is not there: one sentence and exit code 1, with and without Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from millrace_ray.host import Host, difference
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


def test_ray_without_an_address_is_refused(spec: str, tmp_path: Path) -> None:
    assert refusal(MAIN, spec, tmp_path).startswith("--cluster ray needs RAY_ADDRESS")


def test_a_missing_ray_package_is_reported(spec: str, tmp_path: Path) -> None:
    said = refusal(MAIN, spec, tmp_path, RAY_ADDRESS="127.0.0.1:6379")
    assert said.startswith("Ray is not installed: run `pip install '.[ray]'`")


def test_an_address_without_a_listening_cluster_is_refused(tmp_path: Path) -> None:
    with kept_port() as port:
        said = refusal(LISTENS, f"127.0.0.1:{port}", tmp_path)
    assert said.startswith(f"{ABSENT}127.0.0.1:{port}: ")


def test_a_missing_ray_serve_package_is_reported(tmp_path: Path) -> None:
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


HOSTS = (("10.0.0.1", "2.0", "3.0+cpu"), ("10.0.0.2", "2.0", "3.0+cpu"))


@pytest.mark.parametrize(
    ("third", "said"),
    [
        (("2.0", "3.0+cpu"), ""),
        (("2.1", "3.0+cpu"), "10.0.0.3 has Millrace 2.1, and the launcher is 2.0"),
        (("2.0", "3.1+cpu"), "10.0.0.3 has torch 3.1+cpu, and 10.0.0.1 has 3.0+cpu"),
    ],
)
def test_a_host_with_another_version_is_named(third: tuple[str, str], said: str) -> None:
    hosts = [
        Host(address=address, ports=(1,), millrace=millrace, torch=torch)
        for address, millrace, torch in (*HOSTS, ("10.0.0.3", *third))
    ]
    assert difference(hosts, millrace="2.0") == said


def test_a_launcher_of_another_version_is_reported() -> None:
    host = Host(address="10.0.0.1", ports=(1,), millrace="2.0", torch="3.0")
    assert (
        difference([host], millrace="1.9") == "10.0.0.1 has Millrace 2.0, and the launcher is 1.9"
    )
