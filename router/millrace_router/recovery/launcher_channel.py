"""Messages to and from the launcher: one JSON object per line in each direction."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import structlog

READ_BYTES = 65536
LONGEST_LINE_BYTES = 65536
LONGEST_REASON = 1000
MAX_DESCRIPTORS = 16
NUM_RELAYS = 2
"""Sockets between two routers."""
RELAY_FORM = 1
"""Changes with what two routers say to each other; routers with different ones cannot relay."""

log = structlog.get_logger(__name__)


class LauncherChannel:
    """The connection to the launcher. Methods neither wait nor raise; without a launcher they do nothing."""

    def __init__(self, fd: int | None) -> None:
        """Own the inherited socket `fd`; a descriptor that is no socket counts as no launcher."""
        self.on_restarting: Callable[[bool, str], None] = lambda _planned, _reason: None
        """Called with (planned, reason) when the launcher stops the shards; planned: no request caused it."""
        self.on_gave_up: Callable[[str], None] = lambda _reason: None
        """Called with the reason when the launcher stops restarting the shards."""
        self.on_serving: Callable[[], None] = lambda: None
        """Called when the shards serve, at first and after each restart."""
        self.on_new_life: Callable[[], None] = lambda: None
        """Called when `life` has changed."""
        self.on_moved: Callable[[tuple[str, ...]], None] = lambda _addresses: None
        """Called with the addresses of all ranks when a cluster has placed some of them on other hosts."""
        self.on_release: Callable[[], None] = lambda: None
        """Called when another router is about to take the shards over."""
        self.on_stay: Callable[[], None] = lambda: None
        """Called when the other router has failed, and this one goes on."""
        self.on_relay: Callable[[bool, Sequence[socket.socket]], None] = lambda _is_old, _fds: None
        """Called with two sockets to another router: of the relay, and for connections of clients.

        With True as the first argument this router is the old one.
        """
        self.life = 0
        """The number of the shards' last start, if the launcher has started them."""
        self.trusts_kv = False
        """Whether another router may use the KV that it finds in the shards."""
        self._shards_ready = asyncio.Event()
        self._socket: socket.socket | None = None
        self._is_broken = False
        self._descriptors: deque[int] = deque()
        """Descriptors that came with messages, in order."""
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

    async def shards_ready(self) -> None:
        """Return once the launcher reports that the shards serve, or at once without a launcher."""
        if self._socket is not None:
            await self._shards_ready.wait()

    async def run(self) -> None:
        """Receive messages until the launcher disconnects; returns at once without one."""
        if self._socket is None:
            return
        received = b""
        try:
            while data := await self._read(self._socket):
                *lines, rest = (received + data).split(b"\n")
                received = rest if len(rest) <= LONGEST_LINE_BYTES else b""
                for line in lines:
                    self._receive(line)
        except OSError as error:
            log.debug("the launcher disconnected", error=str(error))
        finally:
            self._socket.close()
            self._socket = None
            self._shards_ready.set()

    async def _read(self, ours: socket.socket) -> bytes:
        """Wait for data, and for the descriptors that come with it. Raises OSError."""
        loop = asyncio.get_running_loop()
        while True:
            readable = asyncio.Event()
            loop.add_reader(ours, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(ours)
            with suppress(BlockingIOError):
                data, descriptors, *_ = socket.recv_fds(ours, READ_BYTES, MAX_DESCRIPTORS)
                self._descriptors.extend(descriptors)
                return data

    def opened(self) -> None:
        """Report that files and flags are right, and that only the shards are missing."""
        self._write({"event": "opened", "relay": RELAY_FORM})

    def released(self) -> None:
        """Report that another router may have the shards."""
        self._write({"event": "released"})

    def relay_lost(self) -> None:
        """Report that the router is gone that computes the requests of this one."""
        self._write({"event": "relay_lost"})

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
            case {"event": "ready", **details}:
                match details:
                    case {"life": int(life)} if life != self.life:
                        self.life = life
                        self.on_new_life()
                self.trusts_kv = details.get("trusts_kv") is True
                self._shards_ready.set()
                self.on_serving()
            case {"event": "restarting", "planned": bool(planned), "reason": str(reason)}:
                self.on_restarting(planned, reason)
            case {"event": "gave_up", "reason": str(reason)}:
                self.on_gave_up(reason)
            case {"event": "moved", "addresses": [*addresses]}:
                self.on_moved(tuple(map(str, addresses)))
            case {"event": "release"}:
                self.on_release()
            case {"event": "stay"}:
                self.on_stay()
            case {"event": "relay", "is_old": bool(is_old)} if len(self._descriptors) >= NUM_RELAYS:
                fds = [self._descriptors.popleft() for _ in range(NUM_RELAYS)]
                self.on_relay(is_old, [socket.socket(fileno=fd) for fd in fds])
            case _ if line:
                log.debug(
                    "the launcher sent an unknown event", line=line[:100].decode(errors="replace")
                )
