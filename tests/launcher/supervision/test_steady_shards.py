"""Shards that served for long before they died are no crash loop; shards that the router restarts may be one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace_launcher.errors import ShardCrashLoop
from millrace_launcher.host.threads import ThreadPlan
from millrace_launcher.processes.children import Children, first
from millrace_launcher.settings.arguments import read_settings
from millrace_launcher.settings.commands import Commands, ModelFolders, Programs
from millrace_launcher.supervision.shards import STEADY_SECONDS, Shards
from millrace_testing.launcher.fake_launcher import CHILDREN


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
