"""Has a group of shards restarted: by the launcher, or by whoever supervises ranks that no launcher of ours knows."""

from __future__ import annotations

from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.shards.errors import ShardLost
from millrace_router.shards.group import ShardGroup


class GroupRestart:
    """Asks for one restart at a time.

    A launcher restarts its ranks itself. Other ranks are ended over the wire, so that their supervisors start new ones:
    all that belong to the group, since the ones that are left wait for a rank that is gone.
    """

    def __init__(self, launcher: LauncherChannel, group: ShardGroup) -> None:
        self._launcher = launcher
        self._group = group
        self._reason: str | None = None
        """Why ranks are being ended."""

    def request(self, reason: str) -> None:
        """Have all ranks restarted."""
        if self._is_supervised:
            self._launcher.restart_shards(reason)
        else:
            self._reason = reason

    def rank_lost(self, reason: str) -> None:
        """A rank is unreachable: its launcher restarts all by itself, and a single rank needs no others."""
        if not self._is_supervised and len(self._group) > 1:
            self._reason = reason

    async def proceed(self) -> None:
        """End ranks that are left of a group that has to restart; raises ShardLost while there are any.

        Called before each attempt to begin an epoch, because a rank may be unreachable at first.
        """
        if self._reason is not None and await self._group.end(self._reason):
            raise ShardLost(f"the ranks restart: {self._reason}")

    def finished(self) -> None:
        """The shards began an epoch."""
        self._reason = None

    @property
    def _is_supervised(self) -> bool:
        return self._launcher.is_open and self._group.is_local
