"""The life of a deployment: download, shards, router, watch, and down again in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from millrace_launcher.banner import closing_banner, url
from millrace_launcher.commands import Commands
from millrace_launcher.errors import (
    DownloadError,
    LaunchError,
    ShardCannotStart,
    ShardFailed,
    WebserverCannotStart,
    WebserverFailed,
)
from millrace_launcher.guard import DONE
from millrace_launcher.logs import log, relay
from millrace_launcher.process import Command, ManagedProcess
from millrace_launcher.readiness import router_ready, shard_ready
from millrace_launcher.sockets import refuse_busy_port
from millrace_router.config import listen_address

DOWNLOAD_GRACE_SECONDS = 10.0
# When the grace is over, the router still cuts off what runs and gives its last answers 5 s to be sent.
EXIT_MARGIN_SECONDS = 10.0
GUARD_SECONDS = 12.0


class Launcher:
    """Owns every child: whatever ends `run`, none of them and none of their sockets is left."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._settings = commands.settings
        self._download: ManagedProcess | None = None
        self._shards: list[ManagedProcess] = []
        self._router: ManagedProcess | None = None
        self._guard: asyncio.subprocess.Process | None = None
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve until a signal; raises LaunchError for every other ending."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        serving = asyncio.create_task(self._serve())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        finally:
            await _cancel((serving, stopping))
            await self._shut_down()

    def _on_signal(self, number: signal.Signals) -> None:
        """The first signal asks for an orderly end; a second Ctrl-C takes everything down at once."""
        if not self._stop.is_set():
            log.info("%s received, shutting down", signal.Signals(number).name)
            self._stop.set()
        elif number == signal.SIGINT:
            log.warning("interrupted again, ending at once")
            for process in self._processes():
                process.kill()

    async def _serve(self) -> None:
        router = self._settings.router
        refuse_busy_port(listen_address(router.hostname), router.port)
        folder = await self._resolve_model()
        await self._start_shards(folder)
        base = await self._start_router(folder)
        self._announce(base)
        await self._until((), shards=ShardFailed, webserver=WebserverFailed)

    async def _resolve_model(self) -> Path:
        """Run the download, whose last line of stdout names the folder."""
        log.info("Starting check and download process for %s", self._commands.model_name)
        command = self._commands.download()
        last = ""

        def on_line(line: str) -> None:
            nonlocal last
            relay(last, source="download")
            last = line

        self._download = await ManagedProcess.start(
            command, on_line=on_line, on_error_line=_relay_stderr(command)
        )
        code = await self._download.wait()
        folder = _folder_of(last)
        if code != 0 or folder is None:
            relay(last, source="download")
            _explain(self._download, "Download encountered an error")
            raise DownloadError
        log.info("Successfully resolved the model to %s", folder)
        return folder

    async def _start_shards(self, folder: Path) -> None:
        started = time.monotonic()
        guard = self._commands.guard()
        self._guard = await asyncio.create_subprocess_exec(
            *guard.argv,
            env=dict(guard.environment),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        for rank in range(self._commands.num_shard):
            log.info("Starting shard %d", rank)
            self._shards.append(await self._start(self._commands.shard(rank, folder)))

        async def ready(path: Path) -> None:
            await shard_ready(path)
            log.info("Shard ready in %.3fs", time.monotonic() - started)

        waits = [ready(path) for path in self._commands.socket_paths()]
        await self._until(waits, shards=ShardCannotStart, webserver=WebserverCannotStart)

    async def _start_router(self, folder: Path) -> str:
        """The router's base URL, once it answers there."""
        log.info("Starting Webserver")
        router = self._settings.router
        base = url(listen_address(router.hostname), router.port)
        self._router = await self._start(self._commands.router(folder))
        await self._until([router_ready(base)], shards=ShardFailed, webserver=WebserverCannotStart)
        return base

    def _announce(self, base: str) -> None:
        model = self._commands.model_name
        if self._settings.launcher.json_output:
            fields = {"url": base, "metrics_url": f"{base}/metrics"}
            log.info("%s is served at %s", model, base, extra={"fields": fields})
            return
        needs_key = self._settings.router.api_key is not None
        sys.stdout.write(closing_banner(base, model=model, needs_key=needs_key))
        sys.stdout.flush()

    async def _until(
        self,
        waits: Iterable[Awaitable[None]],
        *,
        shards: type[LaunchError],
        webserver: type[LaunchError],
    ) -> None:
        """Return when all waits are over; raise when a child dies first. Without waits, watch for ever."""
        pending = [asyncio.ensure_future(wait) for wait in waits]
        everything = (
            asyncio.gather(*pending) if pending else asyncio.get_running_loop().create_future()
        )
        processes = [*self._shards, *((self._router,) if self._router else ())]
        deaths = {asyncio.create_task(process.wait()): process for process in processes}
        try:
            done, _ = await asyncio.wait((everything, *deaths), return_when=asyncio.FIRST_COMPLETED)
            dead = [deaths[task] for task in done if task in deaths]
            if dead:
                self._report_death(dead[0], shards=shards, webserver=webserver)
            everything.result()
        finally:
            await _cancel((everything, *pending, *deaths))

    def _report_death(
        self, process: ManagedProcess, *, shards: type[LaunchError], webserver: type[LaunchError]
    ) -> None:
        """Log what is known of it and raise."""
        if process is self._router:
            _explain(
                process,
                "Webserver Crashed"
                if webserver is WebserverFailed
                else "Webserver failed to start",
            )
            raise webserver
        rank = self._shards.index(process)
        _explain(
            process,
            f"Shard {rank} crashed" if shards is ShardFailed else f"Shard {rank} failed to start",
        )
        raise shards

    async def _shut_down(self) -> None:
        """Router first, so that requests drain while the shards live; then shards; then sockets."""
        if self._download is not None and self._download.is_running:
            await self._download.terminate(DOWNLOAD_GRACE_SECONDS)
        grace = self._settings.router.graceful_termination_timeout + EXIT_MARGIN_SECONDS
        if self._router is not None:
            await self._router.terminate(grace)
        await asyncio.gather(*(shard.terminate(grace) for shard in self._shards))
        if self._guard is not None:
            self._tell_guard(DONE)
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._guard.wait(), GUARD_SECONDS)

    async def _start(self, command: Command) -> ManagedProcess:
        process = await ManagedProcess.start(
            command,
            on_line=lambda line: relay(line, source=command.name),
            on_error_line=_relay_stderr(command),
        )
        self._tell_guard(str(process.pid))
        return process

    def _tell_guard(self, word: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.write(f"{word}\n".encode())

    def _processes(self) -> list[ManagedProcess]:
        return [
            process
            for process in (self._download, self._router, *self._shards)
            if process is not None
        ]


def _relay_stderr(command: Command) -> Callable[[str], None]:
    """Stderr is shown in full only on death; until then it is for those who debug."""
    return lambda line: relay(line, source=command.name, plain_level=logging.DEBUG)


def _explain(process: ManagedProcess, what: str) -> None:
    """Say how a child ended, with the last lines of its stderr."""
    log.error("%s (%s)", what, process.ending)
    if process.stderr_tail:
        log.error(
            "%s complete standard error output:\n%s", process.name, "\n".join(process.stderr_tail)
        )


def _folder_of(line: str) -> Path | None:
    try:
        return Path(json.loads(line)["model_folder"])
    except (ValueError, KeyError, TypeError):
        return None


async def _cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel and wait; whatever they raise by now is nobody's concern."""
    found = list(tasks)
    for task in found:
        task.cancel()
    await asyncio.gather(*found, return_exceptions=True)
