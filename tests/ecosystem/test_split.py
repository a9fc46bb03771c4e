"""The containers' own commands over TCP: a router without torch, from the wheel, before two shards."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from bench.faults.streams import Clients, differences, mixed_bodies
from bench.harness.server import free_port
from tests.deploy.containers import (
    ROOT,
    command_of,
    dockerfile_of,
    entrypoint,
    environment,
    health_script,
)

from millrace_testing.launcher.e2e import END_SECONDS, until

pytestmark = pytest.mark.ecosystem

MODEL = ROOT / "demo" / "model"
SHARDS = ("shard-0", "shard-1")
STOP_SECONDS = 30
STREAMS = mixed_bodies(8, longest=150)
MIDDLE = 20
START_AGAIN = 75


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


@pytest.fixture(scope="module")
def split(router_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    logs = tmp_path_factory.mktemp("logs")
    here = {"/model": str(MODEL)} | {f"{name}:50051": f"127.0.0.1:{free_port()}" for name in SHARDS}
    meeting, port = str(free_port()), str(free_port())
    with ExitStack() as running:
        shards = [
            running.enter_context(
                Container(
                    name,
                    Path(sys.executable).parent,
                    places=here | {"0.0.0.0:50051": here[f"{name}:50051"], "shard-0": "127.0.0.1"},
                    variables={"MASTER_PORT": meeting, "OMP_NUM_THREADS": "1"},
                    log=logs / name,
                )
            )
            for name in SHARDS
        ]
        for name in SHARDS:
            await_health(name, {"ADDRESS": here[f"{name}:50051"]}, logs / name)
        router = Container(
            "router", router_bin, places=here, variables={"PORT": port}, log=logs / "router"
        )
        running.enter_context(router)
        await_health("router", {"PORT": port}, logs / "router")
        yield Split(f"http://127.0.0.1:{port}", shards)


def test_router_and_shards_answer_by_their_containers_commands(split: Split) -> None:
    body = {"inputs": "What is a KV cache?", "parameters": {"max_new_tokens": 8}}
    asked = urllib.request.Request(
        f"{split.url}/generate",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        text = json.load(answer)["generated_text"]
    assert text.strip()


@pytest.mark.parametrize("number", [1, 0])
async def test_a_group_without_a_launcher_recovers_from_a_killed_rank(
    split: Split, number: int
) -> None:
    killed, other = split.shards[number], split.shards[1 - number]
    async with Clients(split.url) as clients, asyncio.timeout(END_SECONDS):
        undisturbed = await clients.send_all(STREAMS)
        clients.answers = []
        task = asyncio.create_task(clients.send_all(STREAMS))
        await until(lambda: clients.answers and len(clients.answers[0].events) >= MIDDLE)
        ended = len(other.codes)
        killed.process.kill()
        assert differences(undisturbed, await task) == []
    # It cannot go on without its peer: gloo tells it, or the router.
    assert other.codes[ended:] == [START_AGAIN]


@dataclass
class Split:
    """A router and two shards, each with a supervisor that knows nothing but `restart: unless-stopped`."""

    url: str
    shards: list[Container]


class Container:
    """Runs a service's command, with its image's environment, and starts it anew when it ends.

    Names and paths are made this machine's.
    """

    def __init__(
        self,
        service: str,
        programs: Path,
        *,
        places: Mapping[str, str],
        variables: Mapping[str, str],
        log: Path,
    ) -> None:
        dockerfile = dockerfile_of(service)
        # This machine has programs and compiled kernels of its own, and no volume.
        foreign = ("PATH", "MILLRACE_CACHE")
        image = {
            name: value for name, value in environment(dockerfile).items() if name not in foreign
        }
        arguments = command_of(service)
        for name, place in places.items():
            arguments = [argument.replace(name, place) for argument in arguments]
        outer = ("PYTHONPATH", "HOSTNAME")
        base = {name: value for name, value in os.environ.items() if name not in outer}
        self._command = [str(programs / entrypoint(dockerfile)), *arguments]
        self._environment = base | image | dict(variables)
        self._log = log
        self._stopped = False
        self._lock = threading.Lock()
        self._supervisor = threading.Thread(target=self._supervise)
        self.codes: list[int] = []
        """The exit codes so far."""

    def __enter__(self) -> Container:
        self.process = self._start()
        self._supervisor.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stopped = True
            self.process.terminate()
        self._supervisor.join(STOP_SECONDS)
        self.process.kill()
        self._supervisor.join()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as output:
            return subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._log.parent,
            )

    def _supervise(self) -> None:
        while True:
            code = self.process.wait()
            with self._lock:
                if self._stopped:
                    return
                self.codes.append(code)
                self.process = self._start()


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
