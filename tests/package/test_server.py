"""Servers of millrace-verify start with its flags, can be killed, and end with the block."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from millrace.errors import StartError
from millrace.server import LocalServer, LocalServers, NoShard, is_ready
from millrace.verify.comparison import Verdict
from millrace.verify.inside import verify_model
from millrace.verify.options import read_options

SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
print(*sys.argv[1:], flush=True)
class Ready(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
port = next(int(word.partition("=")[2]) for word in sys.argv if word.startswith("--port="))
HTTPServer(("127.0.0.1", port), Ready).serve_forever()
"""
REFUSAL = """
import sys
print("INFO loading")
print("Error: mixtral runs on one shard only")
print("Error: ShardCannotStart")
sys.exit(1)
"""


def program(folder: Path, text: str) -> tuple[str, ...]:
    path = folder / "program.py"
    path.write_text(text)
    return (str(path),)


def port_of(server: LocalServer) -> int:
    return int(server.url.rpartition(":")[2])


def test_a_server_gets_the_users_flags_and_after_them_those_of_the_case(tmp_path: Path) -> None:
    servers = LocalServers(
        model="some/model",
        logs=tmp_path,
        revision="main",
        flags=("--dtype=float32",),
        launcher=program(tmp_path, SERVER),
    )
    with servers.running("chunked", "--max-batch-prefill-tokens=24") as server:
        assert is_ready(port_of(server))
        program_path = str(tmp_path / "program.py")
        children = psutil.Process().children()
        running = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
        (child,) = [child for child in running if program_path in child.cmdline()]
    assert not child.is_running()
    assert not is_ready(port_of(server))
    words = (tmp_path / "chunked.log").read_text().split("\n")[0].split()
    assert words[:3] == ["--model-id=some/model", "--revision=main", "--dtype=float32"]
    assert words[-1] == "--max-batch-prefill-tokens=24"
    assert f"--shard-uds-path={server.socket_prefix}" in words
    assert not Path(server.socket_prefix).parent.exists()


def test_a_server_that_does_not_start_is_an_error_with_its_reason(tmp_path: Path) -> None:
    servers = LocalServers(model=None, logs=tmp_path, launcher=program(tmp_path, REFUSAL))
    with (
        pytest.raises(StartError, match="mixtral runs on one shard only") as refused,
        servers.running("x"),
    ):
        raise AssertionError
    assert "INFO loading" in refused.value.log


def test_the_shard_of_this_deployment_is_killed_and_no_other() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    mine, other = (
        subprocess.Popen([*command, "serve", f"--uds-path=/nowhere/{name}"])
        for name in ("mine", "other")
    )
    try:
        assert LocalServer("http://nowhere", "/nowhere/mine").kill_shard() == mine.pid
        assert mine.wait(30) == -9
        assert other.poll() is None
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()


def test_killing_a_shard_that_does_not_exist_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.server.FIND_SECONDS", 0.0)
    with pytest.raises(NoShard, match="/nowhere/none"):
        LocalServer("http://nowhere", "/nowhere/none").kill_shard()


STAND_IN = """
import sys, threading
from millrace_testing.launcher.verify import fake_server
if REFUSED in sys.argv:
    print("Error: mixtral runs on one shard only")
    sys.exit(1)
port = next(int(word.partition("=")[2]) for word in sys.argv if word.startswith("--port="))
with fake_server(port=port):
    threading.Event().wait()
"""


def test_a_server_that_cannot_be_had_is_named_and_the_others_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    stand_in = STAND_IN.replace("REFUSED", "'--num-shard=2'")
    servers = LocalServers(model="m", logs=tmp_path, launcher=program(tmp_path, stand_in))
    argv = ["m", "--requests", "3"]
    chosen = read_options([*argv, "--cases", "tensor-parallel,cached"], environ={})
    report = verify_model(chosen, servers)
    assert {row.title: row.verdict for row in report.rows} == {
        "no cache / cold cache": Verdict.EQUAL,
        "no cache / warm cache": Verdict.EQUAL,
        "tensor-parallel": Verdict.NOT_EXERCISED,
    }
    assert report.exit_code == 1
