"""Sends batches of events over ZeroMQ: PUB for all that are there, ROUTER for those that missed some."""

from __future__ import annotations

import threading
from collections import deque

import msgpack
import zmq

from millrace_router.kv_events.recorder import Batch

MAX_KEPT_BATCHES = 10_000
MAX_KEPT_BYTES = 64 << 20
"""Batches that are kept for replays, and their bytes."""
MAX_UNSENT = 100_000
"""Batches that wait for a slow subscriber; it misses later ones, and learns that from their numbers."""
END = (-1).to_bytes(8, "big", signed=True)
"""The number after the last batch of a replay."""
NUMBER_BYTES = 8
_STOP = b""


class Replays:
    """The last batches by their numbers, bounded in number and bytes."""

    def __init__(
        self, max_batches: int = MAX_KEPT_BATCHES, max_bytes: int = MAX_KEPT_BYTES
    ) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._kept: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0

    def add(self, number: int, payload: bytes) -> None:
        """Keep a batch; the oldest make room."""
        self._kept.append((number, payload))
        self._num_bytes += len(payload)
        while len(self._kept) > self._max_batches or self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._kept.popleft()[1])

    def since(self, number: int) -> list[tuple[int, bytes]]:
        """Return the kept batches from `number` on."""
        return [kept for kept in self._kept if kept[0] >= number]


class EventPublisher:
    """Publishes batches from its own thread, so that no subscriber and no replay delays the caller.

    A message has three frames: the topic, the number of the batch (8 bytes, big-endian, from 0), and the batch as
    msgpack. A replay is requested by the first number that is missing, as 8 bytes; each answer has a number and a
    batch, and the last one has the number -1 and no batch.
    """

    def __init__(self, address: str, *, replay_address: str | None = None, topic: str = "") -> None:
        """Bind the sockets; raises zmq.ZMQError. Port 0 is a free one."""
        self._context = zmq.Context()
        try:
            self._pub = self._socket(zmq.PUB, address, MAX_UNSENT)
            self.address = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
            self._router, self.replay_address = None, None
            if replay_address is not None:
                self._router = self._socket(zmq.ROUTER, replay_address, 2 * MAX_KEPT_BATCHES)
                self.replay_address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
            here = "inproc://batches"
            self._source, self._sink = (
                self._context.socket(zmq.PULL),
                self._context.socket(zmq.PUSH),
            )
            self._source.set_hwm(0)
            self._sink.set_hwm(0)
            self._source.bind(here)
            self._sink.connect(here)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._topic = topic.encode()
        self._replays = Replays()
        self._num_sent = 0
        self._thread = threading.Thread(target=self._serve, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, batch: Batch) -> None:
        """Hand a batch to the thread; never waits."""
        self._sink.send(msgpack.packb(batch))

    def close(self) -> None:
        """Send what was published, as far as subscribers take it at once, and close the sockets."""
        self._sink.send(_STOP)
        self._thread.join()
        self._context.destroy(linger=0)

    def _socket(self, kind: int, address: str, most_unsent: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(most_unsent)
        socket.bind(address)
        return socket

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._source, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._source in ready:
                # All of them, so that a replay has what was published before the request.
                while self._source.poll(0):
                    payload = self._source.recv()
                    if payload == _STOP:
                        return
                    self._send(payload)
            if self._router is not None and self._router in ready:
                self._replay(self._router)

    def _send(self, payload: bytes) -> None:
        number, self._num_sent = self._num_sent, self._num_sent + 1
        self._pub.send_multipart((self._topic, number.to_bytes(NUMBER_BYTES, "big"), payload))
        self._replays.add(number, payload)

    def _replay(self, router: zmq.Socket[bytes]) -> None:
        """Answer one request of a REQ or DEALER socket; other messages are ignored."""
        frames = router.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != NUMBER_BYTES:
            return
        peer, empty, start = frames
        for number, payload in self._replays.since(int.from_bytes(start, "big")):
            router.send_multipart((peer, empty, number.to_bytes(NUMBER_BYTES, "big"), payload))
        router.send_multipart((peer, empty, END, b""))
