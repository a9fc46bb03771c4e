"""Attempts to open an epoch while the shards are away."""

from __future__ import annotations

from itertools import count

import pytest
from structlog.testing import capture_logs

from millrace_router.errors import RouterError
from millrace_router.prediction.cost import CostModel
from millrace_router.recovery import epochs
from millrace_router.recovery.epochs import EpochManager
from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.recovery.shard_status import ShardStatus
from millrace_router.shards.errors import ShardLost
from millrace_router.shards.group import ShardGroup
from millrace_router.shards.step_channel import StepChannel
from millrace_router.telemetry.metrics import Metrics


class AbsentShards(StepChannel):
    """Two ranks that do not listen: each attempt reports the other one."""

    def __init__(self, num_attempts: int) -> None:
        super().__init__(ShardGroup(["unix:/none/0", "unix:/none/1"]))
        self._num_attempts = num_attempts
        self._attempts = count()

    async def open(self) -> None:
        """Fail `num_attempts` times."""
        number = next(self._attempts)
        if number < self._num_attempts:
            raise ShardLost(f"rank {number % 2} does not listen")


async def test_each_reason_of_an_outage_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "REOPEN_SECONDS", 0.0)
    channel, failed = AbsentShards(6), list[RouterError | None]()
    metrics = Metrics(max_input_tokens=8, max_total_tokens=9)
    manager = EpochManager(
        channel, LauncherChannel(None), ShardStatus(1.0), CostModel(), metrics, oldest=lambda: None
    )
    with capture_logs() as lines:
        await manager.open(failed.append)
    await channel.close()
    told = [line["error"] for line in lines if line["event"].startswith("cannot open a stream")]
    assert len(failed) == 6
    assert told == ["rank 0 does not listen", "rank 1 does not listen"]
