"""Runs a deployment: download, shards, router, and an orderly end in reverse order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time

from millrace_launcher.banner import closing_banner
from millrace_launcher.errors import ShardCrashLoop
from millrace_launcher.logs import log, show
from millrace_launcher.processes.children import Children, cancel, first
from millrace_launcher.settings.commands import Commands
from millrace_launcher.supervision.download import resolve_model
from millrace_launcher.supervision.elsewhere import ClusterShards, RemoteShards
from millrace_launcher.supervision.restarts import Stop
from millrace_launcher.supervision.shards import Shards
from millrace_launcher.supervision.webserver import Webserver

# After the grace, the router ends running requests and has 5 s to send its last answers.
EXIT_MARGIN_SECONDS = 10.0
# Time for the router to report to its clients that the shards do not come back.
LAST_WORDS_SECONDS = 1.0
LOST_GRACE_SECONDS = 5.0


class Launcher:
    """Owns every child; after `run`, no child and no socket is left."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._settings = commands.settings
        self._children = Children()
        self._webserver = Webserver(commands, self._children, self._announce)
        self._shards = self._new_shards()
        router = self._settings.router
        self._grace = router.drain_delay + router.graceful_termination_timeout + EXIT_MARGIN_SECONDS
        self._stop = Stop(self._children)
        self._is_announced = False
        self._began = time.monotonic()
        self._had_terminal = has_terminal()

    def _new_shards(self) -> Shards | RemoteShards | ClusterShards:
        launcher = self._settings.launcher
        if launcher.cluster is not None:
            return ClusterShards(self._commands, self._children, self._webserver.moved)
        if launcher.remote_shards:
            return RemoteShards(launcher.max_restarts)
        return Shards(
            self._commands, self._children, self._webserver.restarting, self._webserver.serving
        )

    async def run(self) -> None:
        """Serve until a signal. Raises LaunchError for any other end."""
        self._stop.listen()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._on_hang_up)
        loop.add_signal_handler(signal.SIGUSR2, self._webserver.hand_over)
        try:
            await first(self._serve(), self._stop.wait())
        except ShardCrashLoop as error:
            await self._give_up(error.reason)
            raise
        finally:
            await self._shut_down()

    def _on_hang_up(self) -> None:
        """End the deployment if its terminal was closed; otherwise restart the shards."""
        if self._had_terminal and not has_terminal():
            self._stop.receive(signal.SIGHUP)
        elif self._is_announced:
            log.info("SIGHUP received, restarting the shards")
            self._webserver.hang_up()
            self._shards.restart_as_planned()
        else:
            log.info("SIGHUP received, but nothing is served yet")

    async def _serve(self) -> None:
        self._webserver.bind()
        folders = await resolve_model(self._commands, self._children)
        await self._children.guard(self._commands.guard())
        await first(self._shards.run(folders), self._webserver.run(folders.model, self._shards))

    def _announce(self, base: str) -> None:
        self._is_announced = True
        log.info("Ready in %.1f s", time.monotonic() - self._began)
        model = self._commands.model_name
        if self._settings.launcher.json_output:
            fields = {"url": base, "metrics_url": f"{base}/metrics"}
            log.info("%s is served at %s", model, base, extra={"fields": fields})
            return
        router = self._settings.router
        needs_key = router.api_key is not None or router.api_key_file is not None
        show(closing_banner(base, model=model, needs_key=needs_key))

    async def _give_up(self, reason: str) -> None:
        """Give the router time to report to its clients."""
        log.error("Giving up on the shards: %s", reason)
        self._webserver.gave_up(reason)
        self._grace = LOST_GRACE_SECONDS
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                await self._stop.wait()

    async def _shut_down(self) -> None:
        """End the router first, so that requests finish on live shards; then the shards; then the guard."""
        warning = asyncio.create_task(self._report_dead_shards())
        # If the shards are dead already, the router gets that message before SIGTERM.
        await asyncio.sleep(0)
        try:
            await self._webserver.terminate(self._grace)
        finally:
            await cancel([warning])
        await self._shards.terminate(self._grace)
        await self._children.dismiss_guard()

    async def _report_dead_shards(self) -> None:
        """Report dead shards to the router, so that requests do not wait for them during the grace."""
        await self._shards.death()
        self._webserver.gave_up("the server is shutting down, and its shards are gone")


def has_terminal() -> bool:
    """Whether stdin is this process's controlling terminal and still open."""
    try:
        os.tcgetpgrp(0)
    except OSError:
        return False
    return True
