"""A load generator that only counts: raw HTTP/1.1 streams on one event loop, no parsing of JSON.

It finds events in the raw bytes, so that no event may span two chunks of HTTP; ours never do. It costs about
a microsecond an event, so that a router on the same machine remains the bottleneck. Each connection sends the
same request `rounds` times, one after the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

EVENT_END = b"\n\n"
STREAM_END = b"\r\n0\r\n\r\n"
"""The end of a chunked body."""


class StreamError(Exception):
    """An answer was not a complete stream of events."""


@dataclass(slots=True)
class Counted:
    """The events of all streams; times of `time.perf_counter`."""

    events: int = 0
    arrivals: list[list[float]] = field(default_factory=list)
    """Arrival times of the chunks of each stream."""

    def gaps(self) -> list[float]:
        """Seconds between the chunks of each stream, shortest first."""
        return sorted(
            later - earlier for times in self.arrivals for earlier, later in pairwise(times)
        )


class EventStream(asyncio.Protocol):
    """One connection: sends, counts, and sends again."""

    def __init__(self, request: bytes, *, rounds: int, counted: Counted) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._rounds = rounds
        self._counted = counted

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._rounds -= 1
        self._tail = b""
        self._began = False
        self._times: list[float] = []
        self._counted.arrivals.append(self._times)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count; after the end of an answer send the next request, if any."""
        if not self._began:
            self._began = True
            if not data.startswith(b"HTTP/1.1 200"):
                self._fail(StreamError(data[:300].decode(errors="replace")))
                return
        self._times.append(time.perf_counter())
        seen = self._tail + data
        # No end of an event is counted twice, because the end of its chunk follows it.
        self._counted.events += seen.count(EVENT_END) - self._tail.count(EVENT_END)
        self._tail = seen[-len(STREAM_END) :]
        if self._tail != STREAM_END:
            return
        if self._rounds:
            self._send()
        elif not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail unless the answer was complete."""
        self._fail(StreamError(f"the connection ended: {exc}"))

    def _fail(self, error: StreamError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


def http_request(path: str, body: bytes) -> bytes:
    """A POST of JSON on a persistent connection."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def count_streams(port: int, requests: Sequence[bytes], *, rounds: int) -> Counted:
    """Run each request on its own connection, all at once; raises StreamError."""
    counted, loop = Counted(), asyncio.get_running_loop()
    transports, streams = [], []
    for request in requests:
        transport, stream = await loop.create_connection(
            lambda request=request: EventStream(  # type: ignore[misc]
                request, rounds=rounds, counted=counted
            ),
            "127.0.0.1",
            port,
        )
        transports.append(transport)
        streams.append(stream)
    try:
        await asyncio.gather(*(stream.done for stream in streams))
    finally:
        for transport in transports:
            transport.abort()
    return counted
