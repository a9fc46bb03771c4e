"""The router as a process, over a shard without a model: start, serve, drain, and how a start fails."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from millrace_testing.router.fake_router import tiny_tokenizer
from millrace_testing.shards.fake_shard import FakeShard, serve_fake_shard

SECONDS = 30
HTTP = httpx.Client(timeout=SECONDS, limits=httpx.Limits(max_keepalive_connections=0))
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "PYTHONPATH": os.pathsep.join(str(ROOT / plane) for plane in ("proto", "router")),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_tokenizer()._rust.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "fake"}')
    return tmp_path


@pytest.fixture
def shard() -> FakeShard:
    return FakeShard(num_blocks=600, max_batch_size=128)


def command(folder: Path, *flags: str) -> list[str]:
    """A router's command line on a free port."""
    return [
        *(sys.executable, "-m", "millrace_router", "--json-output", "--port=0"),
        *("--hostname=127.0.0.1", f"--model-folder={folder}"),
        *(f"--shard-addresses=unix:{folder}/shard", "--max-batch-prefill-tokens=64", *flags),
    ]


class Router:
    """The process, its log so far, and where it listens."""

    def __init__(self, command: list[str]) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT,
            text=True,
        )

    def wait_for(self, message: str) -> dict[str, str]:
        """Fields of the next log line with this message."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            fields: dict[str, str] = json.loads(line)["fields"]
            if fields["message"].startswith(message):
                return fields
        raise AssertionError("".join(self.lines))

    def end(self) -> int:
        """Exit status, once the process has ended by itself."""
        output, _ = self.process.communicate(timeout=SECONDS)
        self.lines.append(output)
        return self.process.returncode


@contextmanager
def started(folder: Path, shard: FakeShard, *flags: str) -> Iterator[Router]:
    """A router process, whether or not its start succeeds."""
    with serve_fake_shard(f"unix:{folder}/shard", shard):
        router = Router(command(folder, *flags))
        try:
            yield router
        finally:
            router.process.kill()
            router.process.communicate()


@contextmanager
def routing(folder: Path, shard: FakeShard, *flags: str) -> Iterator[tuple[Router, str]]:
    """A router that serves, and its URL."""
    with started(folder, shard, *flags) as router:
        yield router, router.wait_for("Connected")["url"]


ASKED = {"inputs": "w1 w2", "parameters": {"max_new_tokens": 3}}


def test_it_serves_and_ends_on_sigterm(folder: Path, shard: FakeShard) -> None:
    with routing(folder, shard, "--usage-stats=off") as (router, url):
        assert HTTP.get(f"{url}/health").status_code == 200
        body = HTTP.post(f"{url}/generate", json=ASKED).json()
        assert len(body["generated_text"].split()) == 3
        assert HTTP.get(f"{url}/info").json()["max_batch_total_tokens"] == 599 * 4
        text = HTTP.get(f"{url}/metrics").text
        assert "\ntgi_batch_max_total_tokens 2396\n" in text
        assert "\ntgi_request_success 1\n" in text
        assert not any("usage" in line or "__main__" in line for line in router.lines)
        router.process.send_signal(signal.SIGTERM)
        assert router.end() == 0


def test_many_may_connect_at_once(folder: Path, shard: FakeShard) -> None:
    with routing(folder, shard) as (router, url), ExitStack() as stack:
        port = int(url.rpartition(":")[2])
        router.process.send_signal(signal.SIGSTOP)
        stack.callback(router.process.send_signal, signal.SIGCONT)
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS))
            for _ in range(400)
        ]
        for client in clients:
            client.sendall(b"GET /ping HTTP/1.1\r\nHost: here\r\n\r\n")
        router.process.send_signal(signal.SIGCONT)
        assert {client.recv(12) for client in clients} == {b"HTTP/1.1 200"}


class Gate(threading.Event):
    """Holds the shard inside a step; `reached` is set when a step has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.reached.set()
        return super().wait(timeout)


@contextmanager
def held_stream(url: str, shard: FakeShard) -> Iterator[tuple[Gate, Future[httpx.Response]]]:
    """A streaming request whose first step the shard computes."""
    gate = shard.gate = Gate()
    with ThreadPoolExecutor(1) as threads:
        try:
            answer = threads.submit(HTTP.post, f"{url}/generate_stream", json=ASKED)
            assert gate.reached.wait(SECONDS)
            yield gate, answer
        finally:
            gate.set()


def test_sigterm_lets_streams_finish_and_refuses_new_requests(
    folder: Path, shard: FakeShard
) -> None:
    with routing(folder, shard) as (router, url), held_stream(url, shard) as (gate, answer):
        router.process.send_signal(signal.SIGTERM)
        router.wait_for("Draining")
        refused = HTTP.post(f"{url}/generate", json=ASKED)
        assert refused.status_code == 503
        assert refused.json()["error_type"] == "unavailable"
        gate.set()
        assert answer.result(SECONDS).text.count("data: ") == 3
        assert router.end() == 0


def test_a_leaving_server_accepts_what_load_balancers_still_send(
    folder: Path, shard: FakeShard
) -> None:
    with routing(folder, shard, "--drain-delay=600") as (router, url):
        assert HTTP.get(f"{url}/readyz").status_code == 200
        router.process.send_signal(signal.SIGTERM)
        router.wait_for("Leaving")
        assert HTTP.get(f"{url}/readyz").status_code == 503
        assert HTTP.post(f"{url}/generate", json=ASKED).status_code == 200
        router.process.send_signal(signal.SIGTERM)
        assert router.end() == -signal.SIGTERM


def test_a_leaving_server_drains_after_the_delay(folder: Path, shard: FakeShard) -> None:
    flags = ("--drain-delay=0.1", "--graceful-termination-timeout=600")
    with (
        routing(folder, shard, *flags) as (router, url),
        held_stream(url, shard) as (gate, answer),
    ):
        router.process.send_signal(signal.SIGTERM)
        router.wait_for("Leaving")
        router.wait_for("Draining")
        assert HTTP.post(f"{url}/generate", json=ASKED).status_code == 503
        gate.set()
        assert answer.result(SECONDS).text.count("data: ") == 3
        assert router.end() == 0


def test_the_second_signal_ends_it_at_once(folder: Path, shard: FakeShard) -> None:
    with routing(folder, shard) as (router, url), held_stream(url, shard) as (_, answer):
        router.process.send_signal(signal.SIGTERM)
        router.wait_for("Draining")
        router.process.send_signal(signal.SIGINT)
        assert router.end() == -signal.SIGINT
        assert isinstance(answer.exception(SECONDS), httpx.HTTPError)


def test_what_outlasts_the_grace_is_cut_off(folder: Path, shard: FakeShard) -> None:
    with (
        routing(folder, shard, "--graceful-termination-timeout=0") as (router, url),
        held_stream(url, shard) as (_, answer),
    ):
        router.process.send_signal(signal.SIGTERM)
        assert router.end() == 0
        assert answer.result(SECONDS).status_code == 424


def test_a_start_that_cannot_succeed(folder: Path, shard: FakeShard) -> None:
    with started(folder, shard, "--max-total-tokens=9000") as router:
        assert router.end() == 1
        message = (
            "Argument validation error: `max_total_tokens` must be <= `max_batch_total_tokens`. "
        )
        assert f"{message}Given: 9000 and 2396" in router.lines[-1]


def test_a_port_that_is_taken(folder: Path, shard: FakeShard) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with started(folder, shard, f"--port={port}") as router:
            assert router.end() == 1
            assert f"Cannot listen on 127.0.0.1:{port}: Address already in use" in router.lines[-1]


def test_a_port_that_is_taken_while_the_shards_warm_up(folder: Path, shard: FakeShard) -> None:
    # Linux lets two sockets bind one port as long as neither listens.
    shard.warmup_gate = gate = threading.Event()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        with started(folder, shard, f"--port={port}") as router:
            router.wait_for("Warming up model")
            other.listen()
            gate.set()
            assert router.end() == 1
            assert f"Cannot listen on 127.0.0.1:{port}: Address already in use" in router.lines[-1]
            assert "Traceback" not in "".join(router.lines)


def test_a_host_that_is_no_address(folder: Path, shard: FakeShard) -> None:
    with routing(folder, shard, "--hostname=4f2a9c") as (router, url):
        assert url.startswith("http://0.0.0.0:")
        (line,) = [line for line in router.lines if "4f2a9c" in line]
        assert json.loads(line)["level"] == "WARN"
        assert json.loads(line)["fields"]["hostname"] == "4f2a9c"


def test_sighup_has_the_keys_read_again(folder: Path, shard: FakeShard) -> None:
    file = folder / "keys"
    file.write_text("a:one")
    with routing(folder, shard, f"--api-key-file={file}") as (router, url):

        def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return HTTP.post(f"{url}/generate", json=ASKED, headers=headers).status_code

        assert (status("one"), status("two")) == (200, 401)
        file.write_text("a:two")
        router.process.send_signal(signal.SIGHUP)
        router.wait_for("API keys were read")
        assert (status("one"), status("two")) == (401, 200)
        file.unlink()
        router.process.send_signal(signal.SIGHUP)
        assert str(file) in router.wait_for("the API keys stay as they were")["error"]
        assert (status("one"), status("two")) == (401, 200)


def test_a_bad_file_of_keys_ends_the_start(folder: Path, shard: FakeShard) -> None:
    file = folder / "keys"
    file.write_text("secret")
    with started(folder, shard, f"--api-key-file={file}") as router:
        assert router.end() == 1
        (line,) = map(json.loads, "".join(router.lines).splitlines())
        assert line["fields"]["message"] == f"--api-key-file: {file}, line 1: must be NAME:KEY"


def test_it_goes_with_its_parent(folder: Path, shard: FakeShard) -> None:
    script = (
        "import subprocess, sys; "
        "child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE); "
        "line = next(l for l in child.stdout if b'Connected' in l); "
        "print(line.decode(), flush=True); sys.stdin.read()"
    )
    with serve_fake_shard(f"unix:{folder}/shard", shard):
        parent = subprocess.Popen(
            [sys.executable, "-c", script, *command(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
        )
        assert parent.stdout is not None
        url = json.loads(parent.stdout.readline())["fields"]["url"]
        assert HTTP.get(f"{url}/health").status_code == 200
        parent.kill()
        parent.communicate()
        assert not answers(url, until=time.monotonic() + SECONDS)


def answers(url: str, *, until: float) -> bool:
    """Whether the server answers until the time `until`."""
    while time.monotonic() < until:
        try:
            HTTP.get(f"{url}/health")
        except httpx.HTTPError:
            return False
    return True
