"""Who restarts the shards: the launcher, or supervisors that see their ranks end."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from millrace_router.recovery.epochs import GroupRestart
from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.shards.errors import ShardLost
from millrace_router.shards.group import ShardGroup
from millrace_testing.shards.fake_shard import FakeShard, serve_fake_shard


class Launcher(LauncherChannel):
    """A launcher that remembers what it is asked for."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked: list[str] = []

    @property
    def is_open(self) -> bool:
        return True

    def restart_shards(self, reason: str) -> None:
        self.asked.append(reason)


async def test_without_a_launcher_the_ranks_are_ended_until_an_epoch_begins(tmp_path: Path) -> None:
    with ExitStack() as ranks:
        shards = [FakeShard(), FakeShard()]
        addresses = [f"unix:{tmp_path}/{rank}" for rank in range(2)]
        for rank, shard in enumerate(shards):
            ranks.enter_context(serve_fake_shard(addresses[rank], shard, rank=rank, world_size=2))
        group = ShardGroup(addresses)
        await group.info()
        restart = GroupRestart(LauncherChannel(None), group)
        await restart.proceed()
        restart.rank_lost("rank 1 is gone")
        with pytest.raises(ShardLost, match="rank 1 is gone"):
            await restart.proceed()
        # All ranks are new, but for one that was not reached at first.
        shards[1].group = 1
        with pytest.raises(ShardLost, match="rank 1 is gone"):
            await restart.proceed()
        await restart.proceed()
        restart.finished()
        await restart.proceed()
        reason = "rank 1 is gone"
        assert [shard.ended for shard in shards] == [[reason], [reason, reason]]
        restart.request("a step does not end")
        await group.close()


async def test_a_launcher_restarts_its_own_ranks() -> None:
    launcher = Launcher()
    restart = GroupRestart(launcher, ShardGroup(["unix:/nowhere", "unix:/there"]))
    restart.rank_lost("rank 1 is gone")
    restart.request("a step does not end")
    await restart.proceed()
    assert launcher.asked == ["a step does not end"]


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_a_single_rank_that_is_lost_ends_nobody(tmp_path: Path, num_ranks: int) -> None:
    shards = [FakeShard() for _ in range(num_ranks)]
    addresses = [f"unix:{tmp_path}/{rank}" for rank in range(num_ranks)]
    with ExitStack() as ranks:
        for rank, shard in enumerate(shards):
            ranks.enter_context(
                serve_fake_shard(addresses[rank], shard, rank=rank, world_size=num_ranks)
            )
        group = ShardGroup(addresses)
        await group.info()
        restart = GroupRestart(LauncherChannel(None), group)
        restart.rank_lost("it is gone")
        if num_ranks == 1:
            await restart.proceed()
        else:
            with pytest.raises(ShardLost):
                await restart.proceed()
        await group.close()
    assert [bool(shard.ended) for shard in shards] == [num_ranks > 1] * num_ranks


async def test_the_launcher_of_another_host_s_ranks_has_none_to_restart() -> None:
    launcher = Launcher()
    restart = GroupRestart(launcher, ShardGroup(["127.0.0.1:1"]))
    restart.request("a step does not end")
    assert launcher.asked == []
