"""Messages to and from the launcher: one JSON object per line in each direction."""

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
    """The connection to the launcher. Methods neither wait nor raise; without a launcher they do nothing."""

    def __init__(self, fd: int | None) -> None:
        """Own the inherited socket `fd`; a descriptor that is no socket counts as no launcher."""
        self.on_restarting: Callable[[bool, str], None] = lambda _planned, _reason: None
        """Called with (planned, reason) when the launcher stops the shards; planned: no request caused it."""
        self.on_gave_up: Callable[[str], None] = lambda _reason: None
        """Called with the reason when the launcher stops restarting the shards."""
        self.on_moved: Callable[[tuple[str, ...]], None] = lambda _addresses: None
        """Called with the addresses of all ranks when a cluster has placed some of them on other hosts."""
        self._socket: socket.socket | None = None
        self._is_broken = False
        if fd is None:
            return
        try:
            self._socket = socket.socket(fileno=fd)
        except OSError as error:
            log.warning("--supervisor-fd is not a socket", fd=fd, error=str(error))
            return
        self._socket.settimeout(0)
        self._socket.set_inheritable(False)

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    async def run(self) -> None:
        """Receive messages until the launcher disconnects; returns at once without one."""
        if self._socket is None:
            return
        loop = asyncio.get_running_loop()
        received = b""
        try:
            while data := await loop.sock_recv(self._socket, READ_BYTES):
                *lines, rest = (received + data).split(b"\n")
                received = rest if len(rest) <= LONGEST_LINE_BYTES else b""
                for line in lines:
                    self._receive(line)
        except OSError as error:
            log.debug("the launcher disconnected", error=str(error))
        finally:
            self._socket.close()
            self._socket = None

    def listening(self) -> None:
        """Report that this process listens on its HTTP port, so that an answer from there is its own."""
        self._write({"event": "listening"})

    def report_progress(self) -> None:
        """Report that the first step of an epoch is complete."""
        self._write({"event": "progress"})

    def restart_shards(self, reason: str) -> None:
        """Request that the launcher kills and restarts all shards."""
        self._write({"event": "restart", "reason": reason[:LONGEST_REASON]})

    def report_suspects(self, count: int) -> None:
        """Report that one of `count` requests breaks the shards, and that the search for it needs restarts."""
        self._write({"event": "suspects", "count": count})

    def _write(self, event: Mapping[str, Any]) -> None:
        if self._socket is None:
            return
        # A newline ends a line that was sent in part, so that it does not absorb this one.
        line = b"\n" * self._is_broken + json.dumps(event).encode() + b"\n"
        try:
            sent = self._socket.send(line)
        except OSError as error:
            log.debug("cannot send to the launcher", what=event["event"], error=str(error))
        else:
            self._is_broken = sent < len(line)

    def _receive(self, line: bytes) -> None:
        event = None
        # Deeply nested JSON is invalid too.
        with suppress(ValueError, RecursionError):
            event = json.loads(line)
        match event:
            case {"event": "restarting", "planned": bool(planned), "reason": str(reason)}:
                self.on_restarting(planned, reason)
            case {"event": "gave_up", "reason": str(reason)}:
                self.on_gave_up(reason)
            case {"event": "moved", "addresses": [*addresses]}:
                self.on_moved(tuple(map(str, addresses)))
            case _ if line:
                log.debug(
                    "the launcher sent an unknown event", line=line[:100].decode(errors="replace")
                )
