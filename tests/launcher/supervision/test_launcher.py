"""Every end of a deployment with fake children: exit code, message, order, no orphan, no socket."""

from __future__ import annotations

import asyncio
import json
import math
import os
import pty
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_launcher.errors import (
    DownloadError,
    LaunchError,
    ShardCannotStart,
    WebserverCannotStart,
    WebserverFailed,
)
from millrace_launcher.host.threads import find_intel_openmp
from millrace_launcher.supervision.control import Control
from millrace_launcher.supervision.launcher import EXIT_MARGIN_SECONDS
from millrace_launcher.supervision.restarts import Breaker, delay_seconds, is_steady
from millrace_router.app import RESPONSE_SECONDS
from millrace_testing.launcher.deployment import SERVED, Deployment, deploy


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


@pytest.mark.long
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
async def test_a_refusal_of_a_child_ends_the_launch_and_is_shown_once(
    tmp_path: Path, role: str
) -> None:
    behaviour = {f"FAKE_{role.upper()}": "refuse"}
    async with deploy(tmp_path, "--num-shard=2", **behaviour) as deployment:
        code, errors = await deployment.end()
    assert (code, errors) == (1, "Error: there is no such thing\n")
    assert "no such thing" not in deployment.output
    assert "standard error" not in deployment.output


async def test_what_the_router_refuses_ends_a_launch_whose_shards_still_load(
    tmp_path: Path,
) -> None:
    async with deploy(tmp_path, FAKE_ROUTER="refuse", FAKE_SHARD="mute") as deployment:
        code, errors = await deployment.end()
    assert (code, errors) == (1, "Error: there is no such thing\n")


async def test_json_logs_end_with_tgis_word(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--json-output", FAKE_SHARD="refuse") as deployment:
        assert await deployment.end() == (1, "")
    last = json.loads(deployment.output.splitlines()[-1])
    assert last["level"] == "ERROR"
    assert last["fields"] == {"error": "ShardCannotStart", "message": "there is no such thing"}


@pytest.mark.parametrize("role", ["shard", "router"])
async def test_an_interrupt_while_a_child_is_not_ready_ends_all_with_0(
    tmp_path: Path, role: str
) -> None:
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


async def test_the_socket_of_a_live_server_is_kept(tmp_path: Path) -> None:
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


class Heard(list[Mapping[str, Any]]):
    """Events; `last` is set by one named `last`."""

    def __init__(self) -> None:
        super().__init__()
        self.last = asyncio.Event()

    def add(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "last":
            self.last.set()
        else:
            self.append(event)


LAST = b'\n{"event": "last"}\n'


def received(line: socket.socket) -> list[dict[str, object]]:
    with line.makefile("rb") as file:
        return [json.loads(text) for text in file if text.strip()]


def drained(reader: socket.socket) -> bytes:
    """All bytes that can be read now."""
    parts = []
    with suppress(BlockingIOError):
        while part := reader.recv(1 << 20):
            parts.append(part)
    return b"".join(parts)


async def test_the_router_receives_restart_and_give_up_messages() -> None:
    control = Control(lambda _: None)
    router = control.theirs.dup()
    control.restarting("shard-0: killed", planned=False)
    control.restarting("as planned", planned=True)
    control.gave_up("x" * 5000)
    control.close()
    with router:
        assert received(router) == [
            {"event": "restarting", "planned": False, "reason": "shard-0: killed"},
            {"event": "restarting", "planned": True, "reason": "as planned"},
            {"event": "gave_up", "reason": "x" * 1000},
        ]


@given(
    st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"")), max_size=5),
    st.integers(1, 20),
)
@settings(deadline=None, max_examples=60)
def test_events_are_read_despite_garbage_and_any_split(garbage: list[bytes], size: int) -> None:
    async def play() -> Heard:
        heard = Heard()
        control = Control(heard.add)
        good = b'{"event": "progress"}'
        sent = b"\n".join([good, *garbage, good]) + LAST
        for start in range(0, len(sent), size):
            control.theirs.send(sent[start : start + size])
            await asyncio.sleep(0)
        await heard.last.wait()
        control.close()
        return heard

    heard = asyncio.run(play())
    assert heard.count({"event": "progress"}) == 2
    assert len(heard) == 2


@pytest.mark.parametrize("line", [b"[" * 30000, b'"' + b"x" * 10**6 + b'"', b"\xff\xfe", b"null"])
async def test_long_deep_and_broken_lines_are_dropped(line: bytes) -> None:
    heard = Heard()
    control = Control(heard.add)
    loop = asyncio.get_running_loop()
    control.theirs.settimeout(0)
    await loop.sock_sendall(control.theirs, line + b'\n{"event": "x"}' + LAST)
    await heard.last.wait()
    assert heard == [{"event": "x"}]
    control.close()


async def test_router_that_does_not_read_blocks_nothing() -> None:
    control = Control(lambda _: None)
    # The buffer is so small that lines are cut.
    control._ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    for _ in range(100):
        control.restarting("é" * 900, planned=False)
    control.theirs.settimeout(0)
    cut = drained(control.theirs)
    assert not cut.endswith(b"\n")
    control.gave_up("end")
    lines = (cut + drained(control.theirs)).split(b"\n")
    assert json.loads(lines[-2]) == {"event": "gave_up", "reason": "end"}
    control.close()


async def test_router_that_is_gone_is_no_error() -> None:
    control = Control(lambda _: None)
    control.theirs.close()
    control.gave_up("r")
    control.close()
    control.close()
    control.gave_up("r")


def restarts_until_no(breaker: Breaker) -> list[float]:
    delays = []
    while (delay := breaker.restart()) is not None:
        delays.append(delay)
    return delays


def test_first_restart_comes_at_once_and_the_next_ones_after_longer_and_longer() -> None:
    assert restarts_until_no(Breaker(10)) == [0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30]


@given(st.integers(1, 10**9))
def test_delays_never_shrink_and_never_exceed_30_s(restarts: int) -> None:
    assert delay_seconds(restarts) <= delay_seconds(restarts + 1) <= 30


@given(st.integers(0, 20), st.lists(st.integers(-5, 10**6), max_size=6))
def test_a_search_has_its_own_restarts_and_no_more(max_restarts: int, suspects: list[int]) -> None:
    breaker = Breaker(max_restarts)
    for count in suspects:
        breaker.suspect(count)
    most = max(suspects, default=0)
    own = 2 * math.ceil(math.log2(most)) + 4 if most > 0 else 0
    delays = restarts_until_no(breaker)
    assert len(delays) == own + max_restarts
    assert delays[:own] == [0.0] * own


@given(st.integers(1, 512))
def test_a_narrowing_search_is_bounded_by_its_widest(count: int) -> None:
    breaker = Breaker(0)
    restarts = 0
    narrowed = count
    while True:
        breaker.suspect(narrowed)
        if breaker.restart() is None:
            break
        restarts += 1
        narrowed = max(1, narrowed // 2)
    assert restarts == 2 * math.ceil(math.log2(count)) + 4


Move = st.one_of(
    st.sampled_from(["progress", "restart"]), st.integers(0, 100).map(lambda n: ("suspect", n))
)


@given(st.integers(0, 5), st.lists(Move, max_size=60))
def test_only_events_after_the_last_progress_count(
    max_restarts: int, moves: list[str | tuple[str, int]]
) -> None:
    """The oracle: a new breaker that gets only the events since then."""
    breaker = Breaker(max_restarts)
    since: list[str | tuple[str, int]] = []

    def play(one: Breaker, move: str | tuple[str, int]) -> float | None:
        if move == "restart":
            return one.restart()
        if isinstance(move, tuple):
            one.suspect(move[1])
        return None

    for move in moves:
        if move == "progress":
            breaker.progressed()
            since.clear()
            continue
        fresh = Breaker(max_restarts)
        for earlier in since:
            play(fresh, earlier)
        since.append(move)
        assert play(breaker, move) == play(fresh, move)


def test_death_before_readiness_is_no_part_of_a_search() -> None:
    breaker = Breaker(2)
    breaker.suspect(2)
    assert [breaker.restart(was_ready=False) for _ in range(3)] == [0, 0.5, None]
    assert [breaker.restart() for _ in range(7)] == [0] * 6 + [None]


@pytest.mark.parametrize(
    ("ready_at", "now", "steady"),
    [(None, 100.0, False), (90.1, 100.0, False), (90.0, 100.0, True), (0.0, 5.0, False)],
)
def test_a_process_that_served_long_enough_is_steady(
    ready_at: float | None, now: float, steady: bool
) -> None:
    assert is_steady(ready_at, now, enough_seconds=10) is steady


BACK = "The router is back"


async def test_router_is_restarted_and_the_shards_stay(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--num-shard=2") as deployment:
        await deployment.until(SERVED)
        for deaths, number in enumerate((signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM), start=1):
            os.kill(deployment.pid("router"), number)
            await deployment.until(BACK, times=deaths)
            assert [len(deployment.lives(f"shard-{rank}")) for rank in (0, 1)] == [1, 1]
            assert len(deployment.lives("router")) == deaths + 1
            assert deployment.output.count(SERVED) == 1
        # The new router has its own socket to the launcher.
        await deployment.tell('{"event": "restart", "reason": "r"}')
        await deployment.until("router heard")
        family = deployment.family()
        deployment.process.send_signal(signal.SIGTERM)
        assert await deployment.end() == (0, "")
        await deployment.assert_gone(family)


async def test_router_that_will_not_stay_up_ends_the_launch(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--max-restarts=1", FAKE_ROUTER="serve,lost") as deployment:
        await deployment.until(SERVED)
        family = deployment.family()
        os.kill(deployment.pid("router"), signal.SIGSEGV)
        assert await deployment.end() == (1, f"Error: {WebserverFailed.sentence}\n")
        assert "Webserver Crashed (killed by signal SIGSEGV)" in deployment.output
        assert "has met its end" in deployment.output
        assert len(deployment.lives("router")) == 2
        await deployment.assert_gone(family)


async def test_a_router_that_never_comes_up_ends_the_launch(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--max-restarts=1", FAKE_ROUTER="lost") as deployment:
        assert await deployment.end() == (1, f"Error: {WebserverCannotStart.sentence}\n")
        assert len(deployment.lives("router")) == 2


async def connected(deployment: Deployment) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that has sent a request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", deployment.port)
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    await writer.drain()
    return reader, writer


async def assert_refused(deployment: Deployment) -> None:
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", deployment.port)


async def until_cut_off(client: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    """Wait until a client is disconnected without an answer."""
    reader, writer = client
    with suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()


async def test_clients_are_refused_before_a_router_was_ready_and_wait_from_then_on(
    tmp_path: Path,
) -> None:
    async with deploy(tmp_path, FAKE_ROUTER="mute,serve,mute,serve") as deployment:
        await deployment.until("router is mute")
        await assert_refused(deployment)
        os.kill(deployment.pid("router"), signal.SIGKILL)
        await deployment.until(SERVED)
        os.kill(deployment.pid("router"), signal.SIGKILL)
        await deployment.until("router is mute", times=2)
        clients = [await connected(deployment) for _ in range(20)]
        os.kill(deployment.pid("router"), signal.SIGKILL)
        for reader, writer in clients:
            assert b" 200 " in await reader.readline()
            writer.close()


async def test_clients_of_a_router_that_will_not_come_back_are_cut_off(tmp_path: Path) -> None:
    # The deaf shard keeps the launcher alive.
    life = {"FAKE_ROUTER": "serve,mute", "FAKE_SHARD": "deaf"}
    async with deploy(tmp_path, "--max-restarts=1", **life) as deployment:
        await deployment.until(SERVED)
        os.kill(deployment.pid("router"), signal.SIGKILL)
        await deployment.until("router is mute")
        client = await connected(deployment)
        os.kill(deployment.pid("router"), signal.SIGKILL)
        await until_cut_off(client)
        await assert_refused(deployment)
        assert deployment.process.returncode is None


async def test_an_interrupt_cuts_off_clients_that_no_router_has_accepted(tmp_path: Path) -> None:
    async with deploy(tmp_path, FAKE_ROUTER="serve,mute", FAKE_SHARD="deaf") as deployment:
        await deployment.until(SERVED)
        os.kill(deployment.pid("router"), signal.SIGKILL)
        await deployment.until("router is mute")
        client = await connected(deployment)
        deployment.process.send_signal(signal.SIGINT)
        await until_cut_off(client)
        await assert_refused(deployment)
        assert deployment.process.returncode is None


async def test_clients_wait_for_shards_no_longer_than_the_grace(tmp_path: Path) -> None:
    shards = {"FAKE_SHARD": "serve,mute,serve"}
    async with deploy(tmp_path, "--recovery-grace=0", **shards) as deployment:
        await deployment.until(SERVED)
        os.kill(deployment.pid("shard-0"), signal.SIGKILL)
        await deployment.until("shard-0 is mute")
        os.kill(deployment.pid("router"), signal.SIGKILL)
        await deployment.until("Restarting the router")
        with suppress(ConnectionRefusedError):
            await until_cut_off(await connected(deployment))
        await assert_refused(deployment)
        os.kill(deployment.pid("shard-0"), signal.SIGKILL)
        await deployment.until(BACK)
        await deployment.tell('{"event": "progress"}')


async def test_another_server_on_the_port_is_not_taken_for_the_router(tmp_path: Path) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with deploy(tmp_path) as deployment:
        # The port was free when the launcher looked.
        await deployment.until("Starting check and download process")
        other = await asyncio.start_server(answer, "127.0.0.1", deployment.port)
        async with other:
            code, errors = await deployment.end()
        assert code == 1
        assert (
            "router cannot listen: [Errno 98] Address already in use" in errors + deployment.output
        )
        assert SERVED not in deployment.output


async def test_progress_of_a_router_resets_its_breaker(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--max-restarts=1") as deployment:
        await deployment.until(SERVED)
        for deaths in (1, 2, 3):
            await deployment.tell('{"event": "progress"}')
            os.kill(deployment.pid("router"), signal.SIGKILL)
            await deployment.until(BACK, times=deaths)


async def test_a_router_that_dies_while_the_shards_load_again_is_restarted(tmp_path: Path) -> None:
    async with deploy(tmp_path, FAKE_SHARD="serve,mute,serve") as deployment:
        await deployment.until(SERVED)
        os.kill(deployment.pid("shard-0"), signal.SIGKILL)
        await deployment.until("is mute")
        os.kill(deployment.pid("router"), signal.SIGKILL)
        await deployment.until("Webserver Crashed")
        os.kill(deployment.pid("shard-0"), signal.SIGKILL)
        await deployment.until(BACK)
        assert len(deployment.lives("shard-0")) == 3
        assert len(deployment.lives("router")) == 2
        waited = deployment.output.index("The shards are back")
        assert deployment.output.rindex("Starting Webserver") > waited
        family = deployment.family()
        deployment.process.send_signal(signal.SIGTERM)
        assert await deployment.end() == (0, "")
        await deployment.assert_gone(family)


async def test_refusal_of_a_router_that_lost_its_shards_is_not_its_own(tmp_path: Path) -> None:
    async with deploy(tmp_path, FAKE_ROUTER="mute,serve") as deployment:
        await deployment.until("Shard ready")
        await deployment.until("router is mute")
        os.kill(deployment.pid("shard-0"), signal.SIGKILL)
        await deployment.until("The shards are back")
        os.kill(deployment.pid("router"), signal.SIGUSR1)
        await deployment.until(SERVED)
        assert "Webserver failed to start (exit code 1)" in deployment.output


async def test_sighup_reaches_only_a_router_with_a_key_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a:b")
    for flags, has_heard in (([], False), ([f"--api-key-file={tmp_path}/keys"], True)):
        async with deploy(tmp_path, *flags) as deployment:
            await deployment.until(SERVED)
            deployment.process.send_signal(signal.SIGHUP)
            await deployment.until("The shards are back")
            deployment.process.send_signal(signal.SIGTERM)
            assert await deployment.end() == (0, "")
            assert len(deployment.lives("router")) == 1 + has_heard
            assert ("router hung up" in deployment.events()) == has_heard


REPLACED = "The router is back"


async def test_sigusr2_replaces_the_router_and_sigterm_ends_both(tmp_path: Path) -> None:
    async with deploy(tmp_path) as deployment:
        await deployment.until(SERVED)
        old = deployment.pid("router")
        deployment.process.send_signal(signal.SIGUSR2)
        await deployment.until(REPLACED)
        await deployment.until("router heard", times=3)
        assert sorted((said["event"], said.get("is_old")) for said in deployment.heard()) == [
            ("relay", False),
            ("relay", True),
            ("release", None),
        ]
        new = deployment.pid("router")
        assert new != old
        # The former one has nothing to relay to, until there is another router.
        os.kill(new, signal.SIGKILL)
        await deployment.until(REPLACED, times=2)
        family = deployment.family()
        assert old in {process.pid for process in family}
        deployment.process.send_signal(signal.SIGTERM)
        assert await deployment.end() == (0, "")
        await deployment.assert_gone(family)
        assert deployment.events().count("router stopped") == 2


async def test_a_router_of_another_form_or_one_that_crashes_replaces_nothing(
    tmp_path: Path,
) -> None:
    behaviour = {"FAKE_FORMS": "1,2,1", "FAKE_ROUTER": "serve,serve,crash,serve"}
    async with deploy(tmp_path, **behaviour) as deployment:
        await deployment.until(SERVED)
        for times, reason in ((1, "cannot relay"), (2, "cannot start")):
            deployment.process.send_signal(signal.SIGUSR2)
            await deployment.until("The former router goes on", times=times)
            assert reason in deployment.output
        assert deployment.heard() == []
        deployment.process.send_signal(signal.SIGUSR2)
        await deployment.until(REPLACED)
        assert len(deployment.lives("router")) == 4


async def test_a_router_with_what_only_one_can_have_open_is_not_replaced(tmp_path: Path) -> None:
    async with deploy(tmp_path, f"--journal={tmp_path}/journal") as deployment:
        await deployment.until(SERVED)
        deployment.process.send_signal(signal.SIGUSR2)
        await deployment.until("a router with --journal cannot be replaced")
        assert len(deployment.lives("router")) == 1


async def test_closed_terminal_ends_the_deployment(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    async with deploy(tmp_path, FAKE_TERMINAL=str(theirs)) as deployment:
        os.close(theirs)
        await deployment.until(SERVED)
        family = deployment.family()
        # A signal alone does not close it.
        deployment.process.send_signal(signal.SIGHUP)
        await deployment.until("The shards are back")
        os.close(ours)
        assert await deployment.end() == (0, "")
        await deployment.assert_gone(family)


WAITS = "A second router waits"


async def test_a_second_router_takes_over_from_a_killed_one(tmp_path: Path) -> None:
    async with deploy(tmp_path, FAKE_SPARE="0") as deployment:
        await deployment.until(SERVED)
        await deployment.until(WAITS)
        first, second = deployment.lives("router")
        os.kill(first, signal.SIGKILL)
        await deployment.until(BACK)
        # The next one is started only once this one serves.
        await deployment.until(WAITS, times=2)
        assert deployment.lives("router")[:2] == [first, second]
        assert len(deployment.lives("router")) == 3
        assert psutil.pid_exists(second)
        await deployment.tell('{"event": "progress"}')
        family = deployment.family()
        deployment.process.send_signal(signal.SIGTERM)
        assert await deployment.end() == (0, "")
        await deployment.assert_gone(family)


async def test_a_second_router_that_died_is_replaced_by_a_new_one(tmp_path: Path) -> None:
    async with deploy(tmp_path, FAKE_SPARE="0") as deployment:
        await deployment.until(SERVED)
        await deployment.until(WAITS)
        first, second = deployment.lives("router")
        os.kill(second, signal.SIGKILL)
        os.kill(first, signal.SIGKILL)
        await deployment.until(BACK)
        assert deployment.lives("router")[2] not in {first, second}


async def test_a_second_router_that_fails_costs_the_first_one_nothing(tmp_path: Path) -> None:
    life = {"FAKE_ROUTER": "serve,crash,serve"}
    async with deploy(tmp_path, FAKE_SPARE="0", **life) as deployment:
        await deployment.until(SERVED)
        await deployment.until("The second router died (exit code 1)")
        first, _ = deployment.lives("router")
        os.kill(first, signal.SIGKILL)
        await deployment.until(BACK)
        assert "cannot find its feet" in deployment.output


async def test_a_hand_over_ends_the_second_router_whose_code_is_old(tmp_path: Path) -> None:
    async with deploy(tmp_path, FAKE_SPARE="0") as deployment:
        await deployment.until(SERVED)
        await deployment.until(WAITS)
        _, second = deployment.lives("router")
        deployment.process.send_signal(signal.SIGUSR2)
        await deployment.until(REPLACED)
        assert not psutil.pid_exists(second)
        await deployment.until(WAITS, times=2)


@pytest.mark.parametrize("flag", ["--fork-server=off", "--journal=records"])
async def test_no_second_router_waits_where_one_alone_may_run(tmp_path: Path, flag: str) -> None:
    if flag.startswith("--journal"):
        flag = f"--journal={tmp_path}/records"
    async with deploy(tmp_path, flag, FAKE_SPARE="0") as deployment:
        await deployment.until(SERVED)
        os.kill(deployment.pid("router"), signal.SIGKILL)
        await deployment.until(BACK)
        assert len(deployment.lives("router")) == 2
        assert WAITS not in deployment.output
