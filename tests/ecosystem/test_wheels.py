"""The wheels, built and installed in fresh environments, and the programs that they bring."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millrace_proto.version import VERSION
from millrace_testing.project import ROOT

pytestmark = pytest.mark.ecosystem
PARTS = ("proto", "router", "shard", "launcher")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
CONSTRAINTS = str(ROOT / "constraints.txt")


def run(*words: str, text: str = "") -> str:
    """The stdout of a program that must succeed, without the sources of this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        words, input=text, capture_output=True, text=True, env=environment, cwd="/", check=False
    )
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@contextmanager
def fresh(folder: Path, *requirements: str) -> Iterator[Path]:
    """The programs of a new environment with these wheels and what they need, which is gigabytes, for a while."""
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    try:
        install(folder, *requirements)
        yield folder / "bin"
    finally:
        shutil.rmtree(folder)


def install(folder: Path, *requirements: str) -> None:
    """Install into an environment."""
    run(*PIP, "--python", str(folder), "install", "--quiet", "-c", CONSTRAINTS, *requirements)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of all wheels by distribution; that of the whole is built from its source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "build", "--outdir", str(folder))
    run(*build, str(ROOT))
    for part in PARTS:
        run(*build, "--wheel", str(ROOT / part))
    assert [path.name for path in folder.glob("*.tar.gz")] == [f"millrace_server-{VERSION}.tar.gz"]
    return {path.name.partition("-")[0]: str(path) for path in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def whole(wheels: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The programs of an environment with the wheel of the whole."""
    with fresh(tmp_path_factory.mktemp("whole"), wheels["millrace_server"]) as programs:
        yield programs


def test_there_is_a_wheel_of_the_whole_and_of_each_part(wheels: dict[str, str]) -> None:
    assert set(wheels) == {"millrace_server", *(f"millrace_{part}" for part in PARTS)}
    assert all(f"-{VERSION}-py3-none-any.whl" in path for path in wheels.values())


def test_the_router_alone_needs_no_torch(wheels: dict[str, str], tmp_path: Path) -> None:
    with fresh(tmp_path, wheels["millrace_proto"], wheels["millrace_router"]) as programs:
        assert run(str(programs / "millrace-router"), "--help").startswith("usage:")
        listed = json.loads(run(*PIP, "--python", str(tmp_path), "list", "--format=json"))
    names = {each["name"] for each in listed}
    assert {"millrace-proto", "millrace-router", "aiohttp"} <= names
    assert not names & {"torch", "transformers", "millrace-server"}


def test_the_parts_together_have_all_that_they_need(wheels: dict[str, str], tmp_path: Path) -> None:
    with fresh(tmp_path, *(wheels[f"millrace_{part}"] for part in PARTS)) as programs:
        for name in ("millrace-launcher", "millrace-shard"):
            assert run(str(programs / name), "--help").startswith("usage:"), name
        run(*PIP, "--python", str(tmp_path), "check")


def test_the_whole_chats_with_its_demo_model(whole: Path) -> None:
    assert run(str(whole / "millrace"), "--version") == f"millrace {VERSION}\n"
    facts = json.loads(run(str(whole / "millrace"), "env", "--json"))
    assert "not installed" not in {facts["torch"], facts["aiohttp"], facts["grpcio"]}
    answer = run(str(whole / "millrace"), "chat", "--temperature=0", text="What is a KV cache?\n")
    assert "keys and values" in answer
    code = "from millrace import LLM; print(LLM().generate('A', None)[0].outputs[0].finish_reason)"
    assert run(str(whole / "python"), "-c", code) in ("stop\n", "length\n")


def test_the_whole_brings_every_program(whole: Path) -> None:
    programs = {path.name for path in whole.glob("*") if path.name.startswith(("mill", "text-"))}
    assert programs == {
        *("millrace", "millrace-launcher", "millrace-router", "millrace-shard"),
        *("millrace-simulate", "millrace-verify", "text-generation-benchmark"),
        *("text-generation-launcher", "text-generation-router", "text-generation-server"),
    }
    for name in sorted(programs):
        assert run(str(whole / name), "--help").startswith("usage:"), name
