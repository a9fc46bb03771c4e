"""Ranks that others run and restart, seen from the launcher of their router."""

from __future__ import annotations

import asyncio

from millrace_launcher.logs import log
from millrace_launcher.settings.folders import ModelFolders
from millrace_launcher.supervision.breaker import Breaker


class RemoteShards:
    """Has the methods of `Shards`, and starts nothing: the router waits for the ranks, and ends them over the wire."""

    life = 1

    def __init__(self, max_restarts: int) -> None:
        self.breaker = Breaker(max_restarts)

    async def ready(self) -> None:
        """The router may start: it waits for the ranks itself."""

    async def death(self) -> None:
        """Their deaths are not seen from here."""
        await asyncio.Event().wait()

    def restart(self, reason: str) -> None:
        """The router ends them itself."""
        log.debug("The router has the shards restarted: %s", reason)

    def restart_as_planned(self) -> None:
        """Whoever runs them restarts them."""
        log.warning("The shards run elsewhere; restart them there")

    async def run(self, folders: ModelFolders) -> None:
        """Wait for ever."""
        del folders
        await asyncio.Event().wait()

    async def terminate(self, grace_seconds: float) -> None:
        """They stay for the next router."""
        del grace_seconds
