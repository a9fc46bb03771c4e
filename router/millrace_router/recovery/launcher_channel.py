"""The launcher, as the router speaks to it: one JSON object a line, each way. It never waits and never raises."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import structlog

READ_BYTES = 65536
LONGEST_LINE_BYTES = 65536
LONGEST_REASON = 1000

log = structlog.get_logger(__name__)


class LauncherChannel:
    """The launcher as the router speaks to it; without one, what is said is dropped."""

    def __init__(self, fd: int | None) -> None:
        """Takes over the inherited socket; one that is none counts as no launcher."""
        self.on_restarting: Callable[[bool, str], None] = lambda _planned, _reason: None
        """Called with (planned, reason) when the shards are brought down; planned: no request is to blame."""
        self.on_gave_up: Callable[[str], None] = lambda _reason: None
        """Called with the reason when nobody restarts the shards any more."""
        self._socket: socket.socket | None = None
        self._is_broken = False
        if fd is None:
            return
        try:
            self._socket = socket.socket(fileno=fd)
        except OSError as error:
            log.warning("--supervisor-fd is no socket", fd=fd, error=str(error))
            return
        self._socket.settimeout(0)
        self._socket.set_inheritable(False)

    @property
    def is_there(self) -> bool:
        """Whether somebody restarts the shards."""
        return self._socket is not None

    async def run(self) -> None:
        """Heed the launcher until it hangs up; returns at once without one."""
        if self._socket is None:
            return
        loop = asyncio.get_running_loop()
        received = b""
        try:
            while data := await loop.sock_recv(self._socket, READ_BYTES):
                *lines, rest = (received + data).split(b"\n")
                received = rest if len(rest) <= LONGEST_LINE_BYTES else b""
                for line in lines:
                    self._heed(line)
        except OSError as error:
            log.debug("the launcher cannot be heard", error=str(error))
        finally:
            self._socket.close()
            self._socket = None

    def listening(self) -> None:
        """Report that this process listens on its HTTP port, so that an answer from there is its own."""
        self._write({"event": "listening"})

    def progressed(self) -> None:
        """Tell that the first step of an epoch has completed."""
        self._write({"event": "progress"})

    def restart_shards(self, reason: str) -> None:
        """Ask for all shards to be killed and started anew."""
        self._write({"event": "restart", "reason": reason[:LONGEST_REASON]})

    def suspect(self, count: int) -> None:
        """Tell that one of `count` requests kills shards and is searched for, which takes restarts."""
        self._write({"event": "suspects", "count": count})

    def _write(self, event: Mapping[str, Any]) -> None:
        if self._socket is None:
            return
        # The rest of a line that was cut off must not swallow this one.
        line = b"\n" * self._is_broken + json.dumps(event).encode() + b"\n"
        try:
            sent = self._socket.send(line)
        except OSError as error:
            log.debug("the launcher was not told", what=event["event"], error=str(error))
        else:
            self._is_broken = sent < len(line)

    def _heed(self, line: bytes) -> None:
        event = None
        # Deeply nested JSON is garbage too.
        with suppress(ValueError, RecursionError):
            event = json.loads(line)
        match event:
            case {"event": "restarting", "planned": bool(planned), "reason": str(reason)}:
                self.on_restarting(planned, reason)
            case {"event": "gave_up", "reason": str(reason)}:
                self.on_gave_up(reason)
            case _ if line:
                log.debug(
                    "the launcher sent what is no event", line=line[:100].decode(errors="replace")
                )
