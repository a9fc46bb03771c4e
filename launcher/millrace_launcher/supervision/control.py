"""The launcher's end of the socket to the router: JSON lines both ways. It never blocks and never raises."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from millrace_launcher.logs import log

READ_BYTES = 65536
LONGEST_LINE_BYTES = 65536
LONGEST_REASON = 1000


class Control:
    """The socket to one router. The launcher closes the router's end after the router has inherited it."""

    def __init__(self, on_event: Callable[[Mapping[str, Any]], None]) -> None:
        """`on_event` gets objects whose `event` is a string; anything else is dropped."""
        self._on_event = on_event
        self._ours, self.theirs = socket.socketpair()
        self._ours.settimeout(0)
        self._received = b""
        self._is_broken = False
        asyncio.get_running_loop().add_reader(self._ours, self._read)

    def shards_ready(self, life: int | None = None, *, trusts_kv: bool = False) -> None:
        """Report that all shards serve, for the first time in the life of this router or again.

        `life` is the number of their start. With `trusts_kv` nothing is wrong with the KV that the router before has
        left in them.
        """
        trust = {"trusts_kv": True} if trusts_kv else {}
        self._write({"event": "ready", "life": life, **trust})

    def restarting(self, reason: str, *, planned: bool) -> None:
        """Report that the shards are about to go down, or are down."""
        self._write({"event": "restarting", "planned": planned, "reason": reason[:LONGEST_REASON]})

    def moved(self, addresses: Sequence[str]) -> None:
        """Report where the shards are now."""
        self._write({"event": "moved", "addresses": list(addresses)})

    def gave_up(self, reason: str) -> None:
        """Report that the shards will not be restarted."""
        self._write({"event": "gave_up", "reason": reason[:LONGEST_REASON]})

    def release(self) -> None:
        """Have the router release the shards for another one, which is ready for them."""
        self._write({"event": "release"})

    def stay(self) -> None:
        """Have the router take the shards back: the other one is gone."""
        self._write({"event": "stay"})

    def relay(self, sockets: Sequence[socket.socket], *, is_old: bool) -> None:
        """Give the router one end of the sockets between the old router and the next one."""
        self._write({"event": "relay", "is_old": is_old}, sockets)

    def close(self) -> None:
        self.theirs.close()
        if self._ours.fileno() != -1:
            asyncio.get_running_loop().remove_reader(self._ours)
            self._ours.close()

    def _write(self, event: Mapping[str, Any], sockets: Sequence[socket.socket] = ()) -> None:
        # An incomplete line must not merge with this one.
        line = b"\n" * self._is_broken + json.dumps(event).encode() + b"\n"
        try:
            descriptors = [each.fileno() for each in sockets]
            sent = socket.send_fds(self._ours, [line], descriptors)
        except OSError as error:
            log.debug("event %s was not sent to the router: %s", event["event"], error)
        else:
            self._is_broken = sent < len(line)

    def _read(self) -> None:
        try:
            received = self._ours.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            asyncio.get_running_loop().remove_reader(self._ours)
            return
        *lines, rest = (self._received + received).split(b"\n")
        self._received = rest if len(rest) <= LONGEST_LINE_BYTES else b""
        for line in lines:
            self._handle(line)

    def _handle(self, line: bytes) -> None:
        event = None
        # Deeply nested JSON raises RecursionError.
        with suppress(ValueError, RecursionError):
            event = json.loads(line)
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            self._on_event(event)
        elif line:
            log.debug("the router sent an invalid event: %r", line[:100])
