"""The router is restarted beside running shards, until it dies repeatedly."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
from pathlib import Path

from millrace_launcher.errors import WebserverCannotStart, WebserverFailed
from millrace_testing.launcher.deployment import SERVED, deploy

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


async def test_router_that_never_comes_up(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--max-restarts=1", FAKE_ROUTER="lost") as deployment:
        assert await deployment.end() == (1, f"Error: {WebserverCannotStart.sentence}\n")
        assert len(deployment.lives("router")) == 2


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


async def test_router_dies_while_the_shards_load_again(tmp_path: Path) -> None:
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
        await deployment.until("router is mute")
        os.kill(deployment.pid("shard-0"), signal.SIGKILL)
        await deployment.until("The shards are back")
        os.kill(deployment.pid("router"), signal.SIGUSR1)
        await deployment.until(SERVED)
        assert "Webserver failed to start (exit code 1)" in deployment.output


async def test_sighup_reaches_a_router_with_a_file_of_keys_alone(tmp_path: Path) -> None:
    for flags, has_heard in (([], False), ([f"--api-key-file={tmp_path}/keys"], True)):
        async with deploy(tmp_path, *flags) as deployment:
            await deployment.until(SERVED)
            deployment.process.send_signal(signal.SIGHUP)
            await deployment.until("The shards are back")
            deployment.process.send_signal(signal.SIGTERM)
            assert await deployment.end() == (0, "")
            assert len(deployment.lives("router")) == 1 + has_heard
            assert ("router hung up" in deployment.events()) == has_heard


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
