"""Hands spans to the process that exports them, so that neither their encoding nor a collector delays a token."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import orjson
import structlog

COMMAND = (sys.executable, "-P", "-m", "millrace_router.telemetry.exporting")
FLUSH_SECONDS = 0.2
KEYS = frozenset({"API_KEY", "ADMIN_KEY", "NGROK_AUTHTOKEN"})
"""Variables of the router that the process does not get, in contrast to OpenTelemetry's."""
MAX_WAITING_BYTES = 4 << 20
"""In the pipe: about 4000 requests. Further spans are lost."""
MAX_WAITING_LINES = 4000
"""Requests that wait while the process starts."""
RESTART_SECONDS = 10.0
CLOSE_SECONDS = 5.0

log = structlog.get_logger(__name__)


class SpanSender:
    """Writes spans as lines of JSON to the exporting process, and starts that again when it ends.

    Spans that it cannot take are lost, and have no other effect.
    """

    def __init__(self, settings: Mapping[str, Any], *, command: Sequence[str] = COMMAND) -> None:
        """Start the process; `settings` is its first line."""
        self.num_lost = 0
        self._settings = orjson.dumps(settings, option=orjson.OPT_APPEND_NEWLINE)
        self._command = command
        self._pipe: asyncio.StreamWriter | None = None
        """To the process while it runs."""
        self._waiting: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = asyncio.Event()
        self._running = asyncio.create_task(self._run())

    def send(self, span: Mapping[str, Any]) -> None:
        """Pass a span on soon; raises nothing."""
        if len(self._waiting) >= MAX_WAITING_LINES:
            self._lose(1)
            return
        self._waiting.append(orjson.dumps(span, option=orjson.OPT_APPEND_NEWLINE))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)

    async def close(self) -> None:
        """Pass on what waits, and give the process `CLOSE_SECONDS` to export it."""
        self._is_closing.set()
        await asyncio.wait({self._running}, timeout=CLOSE_SECONDS)
        self._running.cancel()
        with suppress(asyncio.CancelledError):
            await self._running

    def _flush(self) -> None:
        """Write what waits, or keep it until the process runs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pipe = self._pipe
        if pipe is None:
            return
        lines, self._waiting = self._waiting, []
        if pipe.is_closing() or pipe.transport.get_write_buffer_size() > MAX_WAITING_BYTES:
            self._lose(len(lines))
        else:
            pipe.write(b"".join(lines))

    def _lose(self, count: int) -> None:
        if count and not self.num_lost:
            log.warning("spans are lost: the process that exports them does not take them")
        self.num_lost += count

    async def _run(self) -> None:
        """Keep a process running until the sender is closed."""
        environment = {name: value for name, value in os.environ.items() if name not in KEYS}
        while True:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=asyncio.subprocess.PIPE, env=environment
                )
            except OSError as error:
                log.error("the process that exports traces did not start", error=str(error))  # noqa: TRY400
            else:
                await self._serve(process)
            if await self._closes_within(RESTART_SECONDS):
                return

    async def _serve(self, process: asyncio.subprocess.Process) -> None:
        """Write to the process until it ends; once the sender is closed, the pipe's end makes it end."""
        assert process.stdin is not None
        self._pipe = process.stdin
        self._pipe.write(self._settings)
        self._flush()
        closing = asyncio.create_task(self._is_closing.wait())
        ending = asyncio.create_task(process.wait())
        try:
            await asyncio.wait({closing, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not closing.done():
                log.error("the process that exports traces ended", status=ending.result())
            self._flush()
            process.stdin.close()
            await ending
        finally:
            self._pipe = None
            closing.cancel()
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _closes_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_closing.wait()
        return self._is_closing.is_set()
