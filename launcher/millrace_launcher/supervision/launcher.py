"""The life of a deployment: download, shards, router, whatever happens to them, and down again in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys

from millrace_launcher.banner import closing_banner
from millrace_launcher.errors import ShardCrashLoop
from millrace_launcher.logs import log
from millrace_launcher.settings.commands import Commands
from millrace_launcher.settings.sockets import refuse_busy_port
from millrace_launcher.supervision.children import Children
from millrace_launcher.supervision.download import resolve_model
from millrace_launcher.supervision.shards import Shards
from millrace_launcher.supervision.tasks import cancel, first
from millrace_launcher.supervision.webserver import Webserver
from millrace_router.config import listen_address

# When the grace is over, the router still cuts off what runs and gives its last answers 5 s to be sent.
EXIT_MARGIN_SECONDS = 10.0
# For the router to tell its clients that the shards do not come back, before it is asked to end.
LAST_WORDS_SECONDS = 1.0
LOST_GRACE_SECONDS = 5.0


class Launcher:
    """Owns every child: whatever ends `run`, none of them and none of their sockets is left."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._settings = commands.settings
        self._children = Children()
        self._webserver = Webserver(commands, self._children, self._announce)
        self._shards = Shards(commands, self._children, self._webserver.restarting)
        self._grace = self._settings.router.graceful_termination_timeout + EXIT_MARGIN_SECONDS
        self._stop = asyncio.Event()
        self._is_announced = False
        self._had_terminal = has_terminal()

    async def run(self) -> None:
        """Serve until a signal; raises LaunchError for every other ending."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._on_hang_up)
        try:
            await first(self._serve(), self._stop.wait())
        except ShardCrashLoop as error:
            await self._give_up(error.reason)
            raise
        finally:
            await self._shut_down()

    def _on_signal(self, number: signal.Signals) -> None:
        """The first signal asks for an orderly end; a second Ctrl-C takes everything down at once."""
        if not self._stop.is_set():
            log.info("%s received, shutting down", signal.Signals(number).name)
            self._stop.set()
        elif number == signal.SIGINT:
            log.warning("interrupted again, ending at once")
            self._children.kill()

    def _on_hang_up(self) -> None:
        """A terminal that was closed ends the deployment; anybody else who sends it wants new shards."""
        if self._had_terminal and not has_terminal():
            self._on_signal(signal.SIGHUP)
        elif self._is_announced:
            log.info("SIGHUP received, restarting the shards")
            self._shards.restart_as_planned()
        else:
            log.info("SIGHUP received, but nothing is served yet")

    async def _serve(self) -> None:
        router = self._settings.router
        refuse_busy_port(listen_address(router.hostname), router.port)
        folders = await resolve_model(self._commands, self._children)
        await self._children.guard(self._commands.guard())
        webserver = self._webserver.run(folders.model, self._shards)
        await first(self._shards.run(folders), webserver)

    def _announce(self, base: str) -> None:
        self._is_announced = True
        model = self._commands.model_name
        if self._settings.launcher.json_output:
            fields = {"url": base, "metrics_url": f"{base}/metrics"}
            log.info("%s is served at %s", model, base, extra={"fields": fields})
            return
        needs_key = self._settings.router.api_key is not None
        sys.stdout.write(closing_banner(base, model=model, needs_key=needs_key))
        sys.stdout.flush()

    async def _give_up(self, reason: str) -> None:
        """Leave the router a moment to tell its clients."""
        log.error("Giving up on the shards: %s", reason)
        self._webserver.gave_up(reason)
        self._grace = LOST_GRACE_SECONDS
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                await self._stop.wait()

    async def _shut_down(self) -> None:
        """Router first, so that requests drain while the shards live; then shards; then sockets."""
        warning = asyncio.create_task(self._warn_of_dead_shards())
        # If they are gone already, the router hears of it before it is asked to end.
        await asyncio.sleep(0)
        try:
            await self._webserver.terminate(self._grace)
        finally:
            await cancel([warning])
        await self._shards.terminate(self._grace)
        await self._children.dismiss_guard()

    async def _warn_of_dead_shards(self) -> None:
        """Requests do not wait out the grace for shards that nobody restarts any more."""
        await self._shards.death()
        self._webserver.gave_up("the server is shutting down, and its shards are gone")


def has_terminal() -> bool:
    """Whether stdin is the terminal that controls this process, and still there."""
    try:
        os.tcgetpgrp(0)
    except OSError:
        return False
    return True
