"""The containers' own commands over TCP: a router without torch, from the wheel, before two shards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from bench.harness.server import free_port
from tests.deploy.containers import (
    ROOT,
    command_of,
    dockerfile_of,
    entrypoint,
    environment,
    health_script,
)

pytestmark = pytest.mark.ecosystem

MODEL = ROOT / "demo" / "model"
SHARDS = ("shard-0", "shard-1")
STOP_SECONDS = 30


@pytest.fixture(scope="module")
def router_bin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of an environment made as the router's image makes it."""
    folder = tmp_path_factory.mktemp("wheels")
    parts = [str(ROOT / part) for part in ("proto", "router")]
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), *parts)
    venv = tmp_path_factory.mktemp("router") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    (proto,), (router,) = (folder.glob(f"millrace_{part}-*.whl") for part in ("proto", "router"))
    constraints = str(ROOT / "constraints.txt")
    pip("install", "-c", constraints, str(proto), f"{router}[otel]", python=venv / "bin" / "python")
    return venv / "bin"


def pip(*arguments: str, python: Path | str = sys.executable) -> None:
    command = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_the_router_environment_has_no_torch(router_bin: Path) -> None:
    code = (
        "import importlib.util as u, json, millrace_router as r;"
        "print(json.dumps([r.__file__, [u.find_spec(n) is None for n in ('torch', 'transformers')]]))"
    )
    answer = subprocess.run(
        [str(router_bin / "python"), "-c", code], capture_output=True, check=True, cwd="/"
    )
    file, absent = json.loads(answer.stdout)
    assert Path(file).is_relative_to(router_bin.parent)
    assert absent == [True, True]


def test_router_and_shards_answer_by_their_containers_commands(
    router_bin: Path, tmp_path: Path
) -> None:
    here = {"/model": str(MODEL)} | {f"{name}:50051": f"127.0.0.1:{free_port()}" for name in SHARDS}
    meeting, port = str(free_port()), str(free_port())
    with ExitStack() as running:
        for name in SHARDS:
            listens = {"0.0.0.0:50051": here[f"{name}:50051"], "shard-0": "127.0.0.1"}
            variables = {"MASTER_PORT": meeting, "OMP_NUM_THREADS": "1"}
            running.enter_context(
                container(
                    name,
                    Path(sys.executable).parent,
                    places=here | listens,
                    variables=variables,
                    log=tmp_path / name,
                )
            )
        for name in SHARDS:
            await_health(name, {"ADDRESS": here[f"{name}:50051"]}, tmp_path / name)
        running.enter_context(
            container(
                "router",
                router_bin,
                places=here,
                variables={"PORT": port},
                log=tmp_path / "router",
            )
        )
        await_health("router", {"PORT": port}, tmp_path / "router")
        body = {"inputs": "What is a KV cache?", "parameters": {"max_new_tokens": 8}}
        asked = urllib.request.Request(
            f"http://127.0.0.1:{port}/generate",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            text = json.load(answer)["generated_text"]
    assert text.strip()


@contextmanager
def container(
    service: str,
    programs: Path,
    *,
    places: Mapping[str, str],
    variables: Mapping[str, str],
    log: Path,
) -> Iterator[None]:
    """Run a service's entrypoint and command with its image's environment, names and paths made this machine's."""
    dockerfile = dockerfile_of(service)
    # This machine has programs and compiled kernels of its own, and no volume.
    foreign = ("PATH", "MILLRACE_CACHE")
    image = {name: value for name, value in environment(dockerfile).items() if name not in foreign}
    arguments = command_of(service)
    for name, place in places.items():
        arguments = [argument.replace(name, place) for argument in arguments]
    outer = ("PYTHONPATH", "HOSTNAME")
    base = {name: value for name, value in os.environ.items() if name not in outer}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(programs / entrypoint(dockerfile)), *arguments],
            env=base | image | dict(variables),
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
        )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            finally:
                process.kill()
                process.wait()


def await_health(service: str, variables: Mapping[str, str], log: Path) -> None:
    """Ask as the image does until the answer is yes; its script's own patience paces the attempts."""
    command = [sys.executable, str(health_script(dockerfile_of(service)))]
    for _ in range(300):
        answer = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, check=False
        )
        if answer.returncode == 0:
            return
    raise AssertionError(f"{service} is not well:\n{log.read_text(errors='replace')[-3000:]}")
