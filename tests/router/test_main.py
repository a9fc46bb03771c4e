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
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from millrace_proto.listening import bound
from millrace_router.api.body.fields import request_models
from millrace_router.server.bodies import complete
from millrace_testing.launcher.deployment import kept_port
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

    def __init__(self, command: list[str], inherited: Sequence[int] = ()) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT,
            text=True,
            pass_fds=inherited,
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
def started(
    folder: Path, shard: FakeShard, *flags: str, inherited: Sequence[int] = ()
) -> Iterator[Router]:
    """A router process, whether or not its start succeeds."""
    with serve_fake_shard(f"unix:{folder}/shard", shard):
        router = Router(command(folder, *flags), inherited)
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


def test_the_router_serves_and_ends_on_sigterm(folder: Path, shard: FakeShard) -> None:
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


def test_a_leaving_server_accepts_requests_that_load_balancers_still_send(
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


def test_streams_that_outlast_the_grace_are_cut_off(folder: Path, shard: FakeShard) -> None:
    with (
        routing(folder, shard, "--graceful-termination-timeout=0") as (router, url),
        held_stream(url, shard) as (_, answer),
    ):
        router.process.send_signal(signal.SIGTERM)
        assert router.end() == 0
        assert answer.result(SECONDS).status_code == 424


def test_a_start_that_cannot_succeed_ends_with_the_reason(folder: Path, shard: FakeShard) -> None:
    with started(folder, shard, "--max-total-tokens=9000") as router:
        assert router.end() == 1
        message = (
            "Argument validation error: `max_total_tokens` must be <= `max_batch_total_tokens`. "
        )
        assert f"{message}Given: 9000 and 2396" in router.lines[-1]


def test_a_busy_port_ends_the_start(folder: Path, shard: FakeShard) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with started(folder, shard, f"--port={port}") as router:
            assert router.end() == 1
            assert f"Cannot listen on 127.0.0.1:{port}: Address already in use" in router.lines[-1]


def test_a_port_taken_while_the_shards_warm_up_ends_the_start(
    folder: Path, shard: FakeShard
) -> None:
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


@contextmanager
def kept_listener() -> Iterator[tuple[int, tuple[str, int]]]:
    """A bound socket as the launcher keeps one: its descriptor, and its address."""
    # The kernel takes a port that it has chosen itself away from a socket that is shut down.
    with kept_port() as port, bound("127.0.0.1", port) as listener:
        yield listener.fileno(), listener.getsockname()


def sent(address: tuple[str, int]) -> socket.socket:
    """A client that has sent a request."""
    client = socket.create_connection(address, SECONDS)
    client.sendall(b"GET /ping HTTP/1.1\r\nHost: here\r\n\r\n")
    return client


def test_clients_wait_on_an_inherited_socket_while_a_router_is_replaced(
    folder: Path, shard: FakeShard
) -> None:
    shard.warmup_gate = gate = threading.Event()
    with kept_listener() as (fd, address):
        flag = f"--listen-fd={fd}"
        with started(folder, shard, flag, inherited=[fd]) as router:
            router.wait_for("Warming up model")
            with pytest.raises(ConnectionRefusedError):
                sent(address)
            gate.set()
            assert router.wait_for("Connected")["url"] == f"http://127.0.0.1:{address[1]}"
        with ExitStack() as clients:
            waiting = [clients.enter_context(sent(address)) for _ in range(300)]
            with started(folder, shard, flag, inherited=[fd]):
                assert {client.recv(12) for client in waiting} == {b"HTTP/1.1 200"}


def test_clients_wait_for_a_start_no_longer_than_the_grace(folder: Path, shard: FakeShard) -> None:
    shard.warmup_gate = gate = threading.Event()
    gate.set()
    with kept_listener() as (fd, address):
        flag = f"--listen-fd={fd}"
        with started(folder, shard, flag, inherited=[fd]) as router:
            router.wait_for("Connected")
        gate.clear()
        with (
            sent(address) as client,
            started(folder, shard, flag, "--recovery-grace=0", inherited=[fd]) as router,
        ):
            with suppress(ConnectionResetError):
                assert client.recv(1) == b""
            with pytest.raises(ConnectionRefusedError):
                sent(address)
            gate.set()
            router.wait_for("Connected")
            with sent(address) as later:
                assert later.recv(12) == b"HTTP/1.1 200"


def test_a_descriptor_that_is_no_socket_ends_the_start(folder: Path, shard: FakeShard) -> None:
    with started(folder, shard, "--listen-fd=0") as router:
        assert router.end() == 1
        assert "--listen-fd is not a socket: " in router.lines[-1]


def num_prefills(shard: FakeShard) -> int:
    return sum(step.HasField("prefill") for step in shard.steps)


def test_a_killed_router_leaves_its_costs_and_its_quarantine_to_the_next_one(
    folder: Path, shard: FakeShard
) -> None:
    shard.poison_id = 3
    poison = {"inputs": "w1 w2 w3", "parameters": {"max_new_tokens": 2}}
    fd = os.memfd_create("test")
    for life in (1, 2):
        with started(folder, shard, f"--state-fd={fd}", inherited=[fd]) as router:
            url = router.wait_for("Connected")["url"]
            assert sum("Measuring steps" in line for line in router.lines) == (life == 1)
            num_prompts = num_prefills(shard)
            assert HTTP.post(f"{url}/generate", json=poison).status_code == 424
            assert (num_prefills(shard) == num_prompts) == (life == 2)
            records = HTTP.get(f"{url}/v1/quarantine").json()["quarantined"]
            assert [record["prompt_tokens"] for record in records] == [3]
    os.close(fd)


NEEDLESS = """
import sys
import millrace_router.serving
from millrace_router.api.body.fields import request_models
needless = ("jsonschema", "opentelemetry", "ray", "torch", "zmq", "millrace_router.journal.replay")
print([name for name in needless if name in sys.modules])
print([model.__name__ for model in request_models() if model.__pydantic_complete__])
"""


def test_a_start_imports_and_builds_only_what_it_needs() -> None:
    command = [sys.executable, "-c", NEEDLESS]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n[]\n"


def test_every_model_of_a_body_can_be_completed_by_several_threads() -> None:
    models = list(request_models())
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(complete, models * 4))
    assert models
    assert all(model.__pydantic_complete__ for model in models)


def test_a_hostname_without_an_address_is_warned_of(folder: Path, shard: FakeShard) -> None:
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


def test_the_router_ends_with_its_parent(folder: Path, shard: FakeShard) -> None:
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
