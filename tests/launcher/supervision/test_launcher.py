"""Every end of a deployment with fake children: exit code, message, order, no orphan, no socket."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import psutil
import pytest

from millrace_launcher.errors import (
    DownloadError,
    LaunchError,
    ShardCannotStart,
    WebserverCannotStart,
)
from millrace_launcher.host.threads import find_intel_openmp
from millrace_launcher.supervision.launcher import EXIT_MARGIN_SECONDS
from millrace_router.app import RESPONSE_SECONDS
from millrace_testing.launcher.deployment import SERVED, deploy


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_ends_router_before_shards_and_exits_0(
    tmp_path: Path, number: signal.Signals
) -> None:
    async with deploy(tmp_path, "--num-shard=2") as deployment:
        await deployment.until(SERVED)
        family = deployment.family()
        assert len(deployment.sockets()) == 2
        deployment.process.send_signal(number)
        code, errors = await deployment.end()
        assert (code, errors) == (0, "")
        await deployment.assert_gone(family)
        assert deployment.events()[0] == "router stopped"
        assert sorted(deployment.events()[1:]) == ["shard-0 stopped", "shard-1 stopped"]


async def test_router_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    async with deploy(tmp_path, "-g", "0", FAKE_ROUTER="deaf") as deployment:
        await deployment.until(SERVED)
        family = deployment.family()
        deployment.process.send_signal(signal.SIGTERM)
        code, _ = await deployment.end()
        assert code == 0
        assert "Killing router" in deployment.output
        await deployment.assert_gone(family)
        assert deployment.events() == ["shard-0 stopped"]


def test_router_has_time_for_its_last_answers_before_it_is_killed() -> None:
    assert EXIT_MARGIN_SECONDS >= RESPONSE_SECONDS + 5


async def test_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    async with deploy(tmp_path, FAKE_ROUTER="deaf") as deployment:
        await deployment.until(SERVED)
        family = deployment.family()
        deployment.process.send_signal(signal.SIGINT)
        await deployment.until("Terminating router")
        deployment.process.send_signal(signal.SIGINT)
        code, _ = await deployment.end()
        assert code == 0
        await deployment.assert_gone(family)
        assert deployment.events() == []


@pytest.mark.parametrize(
    ("role", "error", "words"),
    [
        ("download", DownloadError, "Download encountered an error"),
        ("shard", ShardCannotStart, "Shard 0 failed to start"),
        ("router", WebserverCannotStart, "Webserver failed to start"),
    ],
)
async def test_child_that_dies_at_start_is_reported_with_its_stderr(
    tmp_path: Path, role: str, error: type[LaunchError], words: str
) -> None:
    async with deploy(tmp_path, **{f"FAKE_{role.upper()}": "crash"}) as deployment:
        code, errors = await deployment.end()
        assert (code, errors) == (1, f"Error: {error.sentence}\n")
        assert f"{words} (exit code 1)" in deployment.output
        assert "cannot find its feet" in deployment.output
        assert deployment.sockets() == []
        names = {path.stem for path in tmp_path.glob("*.pid")}
        assert not any(psutil.pid_exists(deployment.pid(name)) for name in names)


@pytest.mark.parametrize("role", ["download", "shard", "router"])
async def test_what_a_child_says_ends_the_launch_and_is_said_once(
    tmp_path: Path, role: str
) -> None:
    behaviour = {f"FAKE_{role.upper()}": "refuse"}
    async with deploy(tmp_path, "--num-shard=2", **behaviour) as deployment:
        code, errors = await deployment.end()
    assert (code, errors) == (1, "Error: there is no such thing\n")
    assert "no such thing" not in deployment.output
    assert "standard error" not in deployment.output


async def test_json_logs_end_with_tgis_word(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--json-output", FAKE_SHARD="refuse") as deployment:
        assert await deployment.end() == (1, "")
    last = json.loads(deployment.output.splitlines()[-1])
    assert last["level"] == "ERROR"
    assert last["fields"] == {"error": "ShardCannotStart", "message": "there is no such thing"}


@pytest.mark.parametrize("role", ["shard", "router"])
async def test_interrupt_while_a_child_is_not_ready(tmp_path: Path, role: str) -> None:
    async with deploy(tmp_path, **{f"FAKE_{role.upper()}": "mute"}) as deployment:
        await deployment.until("is mute")
        family = deployment.family()
        deployment.process.send_signal(signal.SIGINT)
        code, errors = await deployment.end()
        assert (code, errors) == (0, "")
        await deployment.assert_gone(family)


async def test_kill_9_of_the_launcher_ends_every_child(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--num-shard=2", FAKE_SHARD="", FAKE_ROUTER="deaf") as deployment:
        await deployment.until(SERVED)
        family = deployment.family()
        # Two shards, the router and the guard.
        assert len(family) == 4
        deployment.process.kill()
        code, _ = await deployment.end()
        assert code == -signal.SIGKILL
        await deployment.assert_gone(family)
        assert deployment.events() == []


async def test_socket_of_a_dead_server_is_taken_over(tmp_path: Path) -> None:
    stale = tmp_path / "shard.sock-0"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(stale))
    async with deploy(tmp_path) as deployment:
        await deployment.until(SERVED)
        deployment.process.send_signal(signal.SIGTERM)
        assert (await deployment.end())[0] == 0


async def test_socket_of_a_live_server_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "shard.sock-0"
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(path))
        alive.listen()
        async with deploy(tmp_path) as deployment:
            code, errors = await deployment.end()
        assert code == 1
        assert errors.startswith("Error: another server is listening on")
        assert path.is_socket()
        assert not (tmp_path / "shard-0.pid").exists()


async def test_busy_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        async with deploy(tmp_path, f"--port={port}") as deployment:
            code, errors = await deployment.end()
    assert code == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in errors
    assert list(tmp_path.glob("*.pid")) == []


async def test_json_logs_stay_json_and_levels_are_kept(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--json-output") as deployment:
        await deployment.until(SERVED)
        deployment.process.send_signal(signal.SIGTERM)
        await deployment.end()
    records = [json.loads(line) for line in deployment.output.splitlines()]
    assert all({"timestamp", "level", "fields", "target"} <= record.keys() for record in records)
    messages = [record["fields"]["message"] for record in records if record["target"] == "fake"]
    assert messages == ["shard-0 serves"]


async def test_values_reach_their_owner_and_secrets_stay_out_of_argv(tmp_path: Path) -> None:
    environment = {
        "MAX_TOTAL_TOKENS": "512",
        "HF_API_TOKEN": "hf_x",
        "LOG_LEVEL": "info",
        "PORT": "1",
    }
    flags = ("--api-key=secret", "--dtype=float32", "--max-input-length=100", "--cuda-graphs=0")
    async with deploy(tmp_path, *flags, **environment) as deployment:
        await deployment.until(SERVED)
        deployment.process.send_signal(signal.SIGTERM)
        await deployment.end()
    router = json.loads((tmp_path / "router.json").read_text())
    shard = json.loads((tmp_path / "shard-0.json").read_text())
    assert "--max-total-tokens=512" in router["argv"]
    assert "--max-input-tokens=100" in router["argv"]
    assert f"--shard-addresses=unix:{tmp_path}/shard.sock-0" in router["argv"]
    assert "--model-id=some/model" in router["argv"]
    assert router["environ"]["API_KEY"] == "secret"
    assert "secret" not in " ".join(router["argv"] + shard["argv"])
    assert "API_KEY" not in shard["environ"]
    assert "--dtype=float32" in shard["argv"]
    assert "--cuda-graphs=0" in shard["argv"]
    assert not {"PORT", "MAX_TOTAL_TOKENS", "LOG_LEVEL"} & router["environ"].keys()
    assert shard["environ"]["HF_TOKEN"] == "hf_x"
    assert "secret" not in deployment.output


async def test_second_launcher_with_the_same_sockets_is_refused_at_once(tmp_path: Path) -> None:
    async with deploy(tmp_path) as first:
        await first.until(SERVED)
        async with deploy(tmp_path) as second:
            code, errors = await second.end()
        assert code == 1
        assert errors.startswith("Error: another server uses")
        assert "--shard-uds-path" in errors
        first.process.send_signal(signal.SIGTERM)
        assert await first.end() == (0, "")
    assert not (tmp_path / "shard.sock.lock").exists()


async def test_flags_without_effect_take_one_line_each(tmp_path: Path) -> None:
    flags = ("--cuda-graphs=1", "--usage-stats=off", "--max-image-fetch-size=1")
    async with deploy(tmp_path, *flags, "--device=cpu", "--cuda-memory-fraction=0.5") as deployment:
        await deployment.until(SERVED)
    for flag in (*flags, "--cuda-memory-fraction"):
        assert deployment.output.count(f"{flag.partition('=')[0]} has no effect") == 1


async def test_shards_compute_with_intels_openmp_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    async with deploy(tmp_path) as deployment:
        await deployment.until(SERVED)
        maps = {
            name: Path(f"/proc/{deployment.pid(name)}/maps").read_text()
            for name in ("shard-0", "router")
        }
    assert ("libiomp5" in maps["shard-0"]) == (find_intel_openmp() is not None)
    assert "libiomp5" not in maps["router"]
