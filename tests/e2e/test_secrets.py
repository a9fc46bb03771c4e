"""Keys and prompts in the whole system: no process or file shows them to others."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import psutil
import pytest

from millrace_testing.launcher.e2e import END_SECONDS, Server, launch

API_KEY = "key-b7e2"
HUB_TOKEN = "hf_secret93d1"
PROMPT = "a prompt-5c0f"
HEADER = "header-e81a"
SECRETS = (API_KEY, HUB_TOKEN, PROMPT, HEADER)
AUTHORIZED = {"authorization": f"Bearer {API_KEY}"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    secrets = {"API_KEY": API_KEY, "HF_TOKEN": HUB_TOKEN, "HUGGING_FACE_HUB_TOKEN": HUB_TOKEN}
    with launch("--log-level=trace", "--env", env=secrets) as running:
        yield running


def test_command_lines_hold_no_secrets_and_shards_no_key(server: Server) -> None:
    """Anyone on the host reads command lines; a process' environment only its user does."""
    launcher = psutil.Process(server.process.pid)
    processes = [launcher, *launcher.children(recursive=True)]
    commands = {process.pid: " ".join(process.cmdline()) for process in processes}
    assert sum("millrace_shard" in command for command in commands.values()) >= 1
    assert sum("millrace_router" in command for command in commands.values()) >= 1
    for process in processes:
        for secret in SECRETS:
            assert secret not in commands[process.pid]
        if "millrace_shard" in commands[process.pid]:
            assert API_KEY not in str(process.environ())


def test_only_their_user_can_open_the_sockets_of_shards(server: Server) -> None:
    sockets = [path for path in server.sockets.rglob("*") if path.is_socket()]
    assert sockets
    assert all(path.stat().st_mode & 0o077 == 0 for path in sockets)


def test_no_log_of_any_process_contains_a_secret(server: Server) -> None:
    headers = {"idempotency-key": HEADER, "x-tenant": HEADER, "cookie": HEADER}
    bodies = [
        {"inputs": PROMPT, "parameters": {"max_new_tokens": 3, "stop": [PROMPT]}},
        {"inputs": PROMPT, "parameters": {"temperature": PROMPT}},
        {"inputs": PROMPT * 2000},
        {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3},
    ]
    with httpx.Client(base_url=server.url, timeout=END_SECONDS) as http:
        for path in ("/generate", "/generate_stream", "/v1/chat/completions", "/nowhere"):
            for key in (AUTHORIZED, {"authorization": f"Bearer {HEADER}"}):
                for body in bodies:
                    http.post(f"{path}?k={API_KEY}", json=body, headers=key | headers)
        public = "".join(http.get(path).text for path in ("/info", "/metrics", "/health"))
    assert server.end() == 0
    assert "/nowhere" in server.log
    for secret in SECRETS:
        assert secret not in server.log
        assert secret not in public
