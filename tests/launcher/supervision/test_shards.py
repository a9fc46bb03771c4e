"""After any failure the shards come back, or the launch ends with a message; no process or socket is left."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest

from millrace_launcher.errors import ArgumentValidation, ShardCrashLoop
from millrace_launcher.host.threads import ThreadPlan
from millrace_launcher.processes.children import Children, first
from millrace_launcher.processes.process import ManagedProcess
from millrace_launcher.settings.arguments import read_settings
from millrace_launcher.settings.commands import Commands, ModelFolders, Programs
from millrace_launcher.settings.rank_arguments import prepare_ranks, read_rank_settings
from millrace_launcher.supervision import readiness
from millrace_launcher.supervision.rank_host import RankHost
from millrace_launcher.supervision.shards import STEADY_SECONDS, Shards
from millrace_launcher.supervision.trust import START_AGAIN
from millrace_testing.launcher.deployment import SERVED, Deployment, deploy
from millrace_testing.launcher.fake_launcher import CHILDREN

BACK = "The shards are back"


def is_alive(pid: int) -> bool:
    """Whether it runs: whoever inherits the child of a killed process may not wait for it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def end_in_order(deployment: Deployment) -> None:
    family = deployment.family()
    deployment.process.send_signal(signal.SIGTERM)
    assert await deployment.end() == (0, "")
    await deployment.assert_gone(family)
    processes = [
        pid for path in deployment.folder.glob("*.lives") for pid in deployment.lives(path.stem)
    ]
    assert not any(map(is_alive, processes))


async def test_death_of_one_rank_restarts_the_group(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--num-shard=2") as deployment:
        await deployment.until(SERVED)
        router = deployment.pid("router")
        numbers = (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGRTMIN + 1)
        for deaths, number in enumerate(numbers, start=1):
            os.kill(deployment.pid("shard-1"), number)
            await deployment.until(BACK, times=deaths)
            lives = [len(deployment.lives(f"shard-{rank}")) for rank in (0, 1)]
            assert lives == [deaths + 1] * 2
            assert deployment.lives("router") == [router]
            await deployment.until("router heard", times=2 * deaths)
            said, serving = deployment.heard()[-2:]
            assert len(deployment.heard()) == 2 * deaths
            assert (said["event"], said["planned"]) == ("restarting", False)
            assert serving == {"event": "ready", "life": deaths + 1}
            assert "shard-1" in str(said["reason"])
        await end_in_order(deployment)


async def test_stopped_rank_is_killed_with_the_group(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--num-shard=2") as deployment:
        await deployment.until(SERVED)
        os.kill(deployment.pid("shard-0"), signal.SIGSTOP)
        os.kill(deployment.pid("shard-1"), signal.SIGKILL)
        await deployment.until(BACK)
        await end_in_order(deployment)


async def test_shards_killed_while_loading_are_restarted(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--num-shard=2", FAKE_SHARD="mute,mute,serve") as deployment:
        for rank in (0, 1):
            await deployment.until("is mute", times=2 * rank + 2)
            os.kill(deployment.pid(f"shard-{rank}"), signal.SIGKILL)
        await deployment.until(SERVED)
        for rank in (0, 1):
            assert f"Shard {rank} failed to start (killed by signal SIGKILL)" in deployment.output
        assert len(deployment.lives("router")) == 1
        await end_in_order(deployment)


async def test_a_shard_that_vanishes_during_startup_is_restarted(tmp_path: Path) -> None:
    async with deploy(tmp_path, FAKE_SHARD="gone,serve") as deployment:
        await deployment.until(SERVED)
        await end_in_order(deployment)


async def test_refusal_to_start_counts_as_a_crash_once_the_shards_have_served(
    tmp_path: Path,
) -> None:
    async with deploy(tmp_path, FAKE_SHARD="serve,crash,serve") as deployment:
        await deployment.until(SERVED)
        os.kill(deployment.pid("shard-0"), signal.SIGKILL)
        await deployment.until(BACK)
        assert len(deployment.lives("shard-0")) == 3
        assert "cannot find its feet" in deployment.output
        await end_in_order(deployment)


@pytest.mark.parametrize("num_shard", [1, 2])
async def test_crash_loop_ends_with_its_own_exit_code(tmp_path: Path, num_shard: int) -> None:
    flags = (f"--num-shard={num_shard}", "--max-restarts=2")
    async with deploy(tmp_path, *flags, FAKE_SHARD="serve,lost") as deployment:
        await deployment.until(SERVED)
        family = deployment.family()
        os.kill(deployment.pid("shard-0"), signal.SIGKILL)
        code, errors = await deployment.end()
        assert code == 3
        # Of two ranks that end, either is the first.
        assert re.match("Error: giving up on the shards: shard-[01]: killed by", errors)
        assert errors.endswith("restarts without progress (--max-restarts)\n")
        assert deployment.output.count("Starting shard 0") == 3
        assert "has met its end" in deployment.output
        assert [said["event"] for said in deployment.heard()] == [*["restarting"] * 3, "gave_up"]
        assert deployment.events()[-1] == "router stopped"
        await deployment.assert_gone(family)


async def test_a_crash_loop_before_the_first_readiness_ends_the_launch(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--max-restarts=1", FAKE_SHARD="lost") as deployment:
        code, errors = await deployment.end()
        assert code == 3
        assert errors.startswith("Error: giving up on the shards: ")
        assert len(deployment.lives("shard-0")) == 2
        assert SERVED not in deployment.output
        await deployment.assert_gone([])


async def test_without_restarts_the_first_crash_ends_the_launch(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--max-restarts=0") as deployment:
        await deployment.until(SERVED)
        family = deployment.family()
        os.kill(deployment.pid("shard-0"), signal.SIGKILL)
        assert (await deployment.end())[0] == 3
        await deployment.assert_gone(family)


async def test_progress_resets_the_breaker(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--max-restarts=1") as deployment:
        await deployment.until(SERVED)
        for deaths in (1, 2, 3):
            await deployment.tell('{"event": "progress"}')
            os.kill(deployment.pid("shard-0"), signal.SIGKILL)
            await deployment.until(BACK, times=deaths)
        os.kill(deployment.pid("shard-0"), signal.SIGKILL)
        assert (await deployment.end())[0] == 3


async def test_search_for_a_poison_request_has_restarts_of_its_own(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--max-restarts=0") as deployment:
        await deployment.until(SERVED)
        await deployment.tell('{"event": "suspects", "count": 1}')
        for deaths in range(1, 5):
            os.kill(deployment.pid("shard-0"), signal.SIGKILL)
            await deployment.until(BACK, times=deaths)
        os.kill(deployment.pid("shard-0"), signal.SIGKILL)
        assert (await deployment.end())[0] == 3


async def test_shards_that_cannot_load_do_not_use_up_the_restarts_of_a_search(
    tmp_path: Path,
) -> None:
    async with deploy(tmp_path, "--max-restarts=1", FAKE_SHARD="serve,lost") as deployment:
        await deployment.until(SERVED)
        await deployment.tell('{"event": "suspects", "count": 1}')
        os.kill(deployment.pid("shard-0"), signal.SIGKILL)
        assert (await deployment.end())[0] == 3
        assert len(deployment.lives("shard-0")) == 3


async def test_router_has_hanging_shards_killed(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--num-shard=2", FAKE_SHARD="deaf") as deployment:
        await deployment.until(SERVED)
        os.kill(deployment.pid("shard-0"), signal.SIGSTOP)
        await deployment.tell('{"event": "restart", "reason": "no step for 30 s"}')
        await deployment.until(BACK)
        await deployment.until("router heard", times=2)
        assert deployment.heard() == [
            {"event": "restarting", "planned": False, "reason": "no step for 30 s"},
            {"event": "ready", "life": 2},
        ]
        assert [len(deployment.lives(f"shard-{rank}")) for rank in (0, 1)] == [2, 2]
        for rank in (0, 1):
            # The launcher kills the other rank as well.
            with suppress(ProcessLookupError):
                os.kill(deployment.pid(f"shard-{rank}"), signal.SIGKILL)


async def test_shards_whose_sockets_were_removed_are_restarted(tmp_path: Path) -> None:
    async with deploy(tmp_path, FAKE_SHARD="deaf,serve") as deployment:
        await deployment.until(SERVED)
        for path in tmp_path.glob("shard.sock-*"):
            path.unlink()
        await deployment.tell('{"event": "restart", "reason": "the socket is gone"}')
        await deployment.until(BACK)
        assert len(deployment.lives("shard-0")) == 2
        assert list(tmp_path.glob("shard.sock-0"))
        await end_in_order(deployment)


async def test_a_shard_that_died_is_forked_of_the_same_loaded_model(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--num-shard=2", FAKE_FORKS="1") as deployment:
        await deployment.until(SERVED)
        for deaths, number in enumerate((signal.SIGKILL, signal.SIGSEGV), start=1):
            os.kill(deployment.pid("shard-1"), number)
            await deployment.until(BACK, times=deaths)
            await deployment.until("router heard", times=2 * deaths)
            assert [event["event"] for event in deployment.heard()[-2:]] == [
                "restarting",
                "ready",
            ]
        for rank in (0, 1):
            (server,) = deployment.lives(f"fork-server-{rank}")
            assert len(deployment.lives(f"shard-{rank}")) == 3
            assert psutil.Process(deployment.pid(f"shard-{rank}")).ppid() == server
        await end_in_order(deployment)


async def test_only_a_first_kill_from_outside_keeps_kv(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--num-shard=2", FAKE_FORKS="1") as deployment:
        await deployment.until(SERVED)
        numbers = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
        for deaths, number in enumerate(numbers, start=1):
            if deaths != 2:
                await deployment.tell('{"event": "progress"}')
            os.kill(deployment.pid("shard-1"), number)
            await deployment.until(BACK, times=deaths)
        for rank in (0, 1):
            requests = (tmp_path / f"fork-server-{rank}.requests").read_text().splitlines()
            kept = [json.loads(request)["kv"] for request in requests]
            assert kept == ["new", "keep", "new", "new", "new"]
        await deployment.tell('{"event": "progress"}')
        await deployment.tell('{"event": "restart", "reason": "a step hangs"}')
        await deployment.until(BACK, times=5)
        requests = (tmp_path / "fork-server-0.requests").read_text().splitlines()
        assert json.loads(requests[-1])["kv"] == "new"
        await end_in_order(deployment)


async def test_a_fork_server_of_weights_keeps_no_kv(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--fork-server=weights", FAKE_FORKS="1") as deployment:
        await deployment.until(SERVED)
        os.kill(deployment.pid("shard-0"), signal.SIGKILL)
        await deployment.until(BACK)
        requests = (tmp_path / "fork-server-0.requests").read_text().splitlines()
        assert [json.loads(request)["kv"] for request in requests] == ["none", "none"]
        await end_in_order(deployment)


async def test_a_fork_server_that_was_killed_takes_its_shard_along_and_loads_anew(
    tmp_path: Path,
) -> None:
    async with deploy(tmp_path, FAKE_FORKS="1") as deployment:
        await deployment.until(SERVED)
        os.kill(deployment.lives("fork-server-0")[0], signal.SIGKILL)
        await deployment.until(BACK)
        assert len(deployment.lives("fork-server-0")) == len(deployment.lives("shard-0")) == 2
        await end_in_order(deployment)


async def test_a_fork_server_that_does_not_fork_is_killed(tmp_path: Path) -> None:
    async with deploy(tmp_path, FAKE_FORKS="1") as deployment:
        await deployment.until(SERVED)
        os.kill(deployment.lives("fork-server-0")[0], signal.SIGSTOP)
        os.kill(deployment.pid("shard-0"), signal.SIGKILL)
        await deployment.tell('{"event": "restart", "reason": "no answer"}')
        await deployment.until(BACK)
        assert len(deployment.lives("fork-server-0")) == 2
        await end_in_order(deployment)


async def test_shards_that_keep_dying_get_a_model_that_is_loaded_anew(tmp_path: Path) -> None:
    dying = {"FAKE_SHARD": "serve,crash,crash,serve", "FAKE_FORKS": "1"}
    async with deploy(tmp_path, **dying) as deployment:
        await deployment.until(SERVED)
        os.kill(deployment.pid("shard-0"), signal.SIGKILL)
        await deployment.until(BACK)
        assert len(deployment.lives("shard-0")) == 4
        assert len(deployment.lives("fork-server-0")) == 2
        await end_in_order(deployment)


async def test_garbage_from_the_router_is_dropped(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--max-restarts=1") as deployment:
        await deployment.until(SERVED)
        for line in (
            "{",
            "7",
            '{"event": 1}',
            '{"event": "restart"}',
            '{"event": "x"}',
            "[" * 5000,
        ):
            await deployment.tell(line)
        await deployment.tell('{"event": "restart", "reason": "r"}')
        await deployment.until(BACK)
        assert len(deployment.lives("shard-0")) == 2
        await end_in_order(deployment)


async def test_sighup_replaces_the_shards(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--num-shard=2", "--max-restarts=0") as deployment:
        await deployment.until(SERVED)
        for times in (1, 2):
            deployment.process.send_signal(signal.SIGHUP)
            await deployment.until(BACK, times=times)
        await deployment.until("router heard", times=4)
        assert [(said["event"], said.get("planned")) for said in deployment.heard()] == [
            ("restarting", True),
            ("ready", None),
        ] * 2
        assert [len(deployment.lives(f"shard-{rank}")) for rank in (0, 1)] == [3, 3]
        assert len(deployment.lives("router")) == 1
        await end_in_order(deployment)


async def test_sighup_loads_the_model_before_the_shards_end(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--num-shard=2", "--max-restarts=0", FAKE_FORKS="1") as deployment:
        await deployment.until(SERVED)
        (tmp_path / "broken").touch()
        deployment.process.send_signal(signal.SIGHUP)
        await deployment.until("the shards stay as they are")
        assert [len(deployment.lives(f"shard-{rank}")) for rank in (0, 1)] == [1, 1]
        (tmp_path / "broken").unlink()
        deployment.process.send_signal(signal.SIGHUP)
        await deployment.until(BACK)
        await deployment.until("router heard", times=2)
        assert [said["event"] for said in deployment.heard()] == ["restarting", "ready"]
        for rank in (0, 1):
            assert len(deployment.lives(f"fork-server-{rank}")) == 3
            assert len(deployment.lives(f"shard-{rank}")) == 2
        await end_in_order(deployment)


async def test_a_death_while_the_model_is_loaded_again_comes_first(tmp_path: Path) -> None:
    async with deploy(tmp_path, FAKE_FORKS="1") as deployment:
        await deployment.until(SERVED)
        (tmp_path / "slow").touch()
        deployment.process.send_signal(signal.SIGHUP)
        await deployment.until("Loading the model a second time")
        os.kill(deployment.pid("shard-0"), signal.SIGKILL)
        await deployment.until(BACK)
        (tmp_path / "slow").unlink()
        await deployment.until(BACK, times=2)
        await deployment.until("router heard", times=4)
        assert [said.get("planned") for said in deployment.heard()] == [False, None, True, None]
        await end_in_order(deployment)


async def test_sighup_while_the_shards_load_waits_for_them(tmp_path: Path) -> None:
    async with deploy(tmp_path, FAKE_SHARD="serve,mute,serve") as deployment:
        await deployment.until(SERVED)
        os.kill(deployment.pid("shard-0"), signal.SIGKILL)
        await deployment.until("is mute")
        deployment.process.send_signal(signal.SIGHUP)
        await deployment.until("SIGHUP received")
        os.kill(deployment.pid("shard-0"), signal.SIGKILL)
        await deployment.until(BACK, times=2)
        await deployment.until("router heard", times=5)
        assert [said.get("planned") for said in deployment.heard()] == [
            *(False, False, None),
            *(True, None),
        ]
        await end_in_order(deployment)


async def test_sigterm_during_the_pause_before_a_restart_ends_in_order(tmp_path: Path) -> None:
    flags = ("--max-restarts=60", "--graceful-termination-timeout=600")
    async with deploy(tmp_path, *flags, FAKE_SHARD="serve,lost", FAKE_DELAY="30") as deployment:
        await deployment.until(SERVED)
        os.kill(deployment.pid("shard-0"), signal.SIGKILL)
        await deployment.until("Restarting the shards in 30 s")
        await end_in_order(deployment)
        assert deployment.heard()[-1]["event"] == "gave_up"


async def test_sigterm_while_the_shards_load_again_ends_in_order(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--num-shard=2", FAKE_SHARD="serve,mute") as deployment:
        await deployment.until(SERVED)
        os.kill(deployment.pid("shard-0"), signal.SIGKILL)
        await deployment.until("is mute", times=2)
        await end_in_order(deployment)


async def test_the_guard_ends_the_children_of_restarted_shards(tmp_path: Path) -> None:
    async with deploy(tmp_path, "--num-shard=2", FAKE_SHARD="parent") as deployment:
        await deployment.until(SERVED)
        os.kill(deployment.pid("shard-0"), signal.SIGKILL)
        await deployment.until(BACK)
        family = deployment.family()
        # Two shards with a child each, the router and the guard.
        assert len(family) == 6
        deployment.process.kill()
        await deployment.end()
        await deployment.assert_gone(family)


def one_shard(folder: Path, behaviour: str) -> Commands:
    """Fake commands that allow one restart without progress."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return Commands(
        settings=read_settings(["--max-restarts=1"]),
        model_id="a/b",
        model_name="a/b",
        num_shard=1,
        shard_uds_path=str(folder / "shard.sock"),
        master_port=29500,
        threads=ThreadPlan(1, {}),
        environ={
            **os.environ,
            "PYTHONPATH": paths,
            "FAKE_DIR": str(folder),
            "FAKE_SHARD": behaviour,
        },
        programs=Programs(shard=(*CHILDREN, "shard")),
    )


class Served:
    """Shards with a clock that the test sets."""

    def __init__(self, folder: Path, behaviour: str = "serve") -> None:
        self._folder = folder
        self._now = 1000.0
        self._goes_down = asyncio.Event()
        self.shards = Shards(
            one_shard(folder, behaviour), Children(), self._restarting, clock=lambda: self._now
        )

    def num_lives(self) -> int:
        return len((self._folder / "shard-0.lives").read_text().split())

    def kill(self) -> None:
        os.kill(int((self._folder / "shard-0.pid").read_text()), signal.SIGKILL)

    async def endure(self, fault: Callable[[], None], *seconds: float) -> None:
        """Kill the shards after each number of seconds of service; return once they are back. Raises as `run` does."""
        try:
            await first(self.shards.run(ModelFolders(self._folder)), self._strike(fault, seconds))
        finally:
            await self.shards.terminate(0)

    async def _strike(self, fault: Callable[[], None], seconds: tuple[float, ...]) -> None:
        for served in seconds:
            await self.shards.ready()
            self._now += served
            fault()
            await self._goes_down.wait()
            self._goes_down.clear()
        await self.shards.ready()

    def _restarting(self, reason: str, *, planned: bool) -> None:
        self._goes_down.set()


async def test_death_after_long_service_is_forgiven_each_time(tmp_path: Path) -> None:
    served = Served(tmp_path)
    await served.endure(served.kill, STEADY_SECONDS, STEADY_SECONDS)
    assert served.num_lives() == 3


async def test_service_of_earlier_lives_does_not_count(tmp_path: Path) -> None:
    served = Served(tmp_path)
    with pytest.raises(ShardCrashLoop):
        await served.endure(served.kill, STEADY_SECONDS, STEADY_SECONDS - 1)
    assert served.num_lives() == 2


async def test_death_while_loading_after_a_long_life_counts(tmp_path: Path) -> None:
    served = Served(tmp_path, "serve,lost,serve")
    with pytest.raises(ShardCrashLoop):
        await served.endure(served.kill, STEADY_SECONDS)
    assert served.num_lives() == 2


async def test_restart_that_the_router_asks_for_counts_however_long_they_served(
    tmp_path: Path,
) -> None:
    served = Served(tmp_path)
    with pytest.raises(ShardCrashLoop):
        await served.endure(lambda: served.shards.restart("hung"), STEADY_SECONDS, STEADY_SECONDS)
    assert served.num_lives() == 2


async def test_a_busy_port_is_reported_before_the_model_is_resolved() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        flags = ["--device=cpu", "--model-id=no/model", f"--address=127.0.0.1:{port}"]
        host = RankHost(prepare_ranks(*read_rank_settings(flags, {}), Programs()))
        with pytest.raises(ArgumentValidation, match=f"port {port} .*choose another --address"):
            await host.run()


async def test_a_rank_that_meets_the_others_after_long_service_has_made_progress(
    tmp_path: Path,
) -> None:
    commands = dataclasses.replace(one_shard(tmp_path, "serve"), addresses=("127.0.0.1:1",))
    (rank,) = RankHost(commands)._ranks
    rank._breaker.restarts = 1
    for seconds, restarts in ((STEADY_SECONDS / 2, 1), (STEADY_SECONDS, 0)):
        rank._ready_at = time.monotonic() - seconds
        process = SimpleNamespace(exit_code=START_AGAIN)
        assert rank._ended(cast("ManagedProcess", process)) == 0.0
        assert rank._breaker.restarts == restarts


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_cancellation_that_comes_with_a_refused_connection_is_not_lost(
    num_turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher awaits cancelled tasks, so a lost cancellation would block it."""
    refused: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    asked = asyncio.Event()

    async def status(_: str) -> int:
        asked.set()
        return await asyncio.shield(refused)

    monkeypatch.setattr(readiness, "_status", status)
    monkeypatch.setattr(readiness, "POLL_SECONDS", 3600)
    waiting = asyncio.create_task(readiness.router_ready("http://nowhere"))
    await asked.wait()
    refused.set_exception(ConnectionRefusedError())
    for _ in range(num_turns):
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting], timeout=60)
    assert waiting.cancelled()
