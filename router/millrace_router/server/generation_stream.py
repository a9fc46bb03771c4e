"""The base of all streams, which make frames of one generation's tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod

from millrace_router.engine.generation import Generation
from millrace_router.request.events import TokenEvent
from millrace_router.server.stream_writer import FrameSink


class GenerationStream(ABC):
    """Makes frames of a generation's tokens, once it is connected to the sink that takes them."""

    _sink: FrameSink

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def connect(self, sink: FrameSink) -> None:
        """Send frames to `sink` from now on; more than one stream may share it."""
        self._sink = sink
        self._generation.connect(self)

    @abstractmethod
    def token(self, event: TokenEvent) -> None:
        """Frame the next token."""

    def fail(self, error: Exception) -> None:
        """End the sink, and with it all streams that share it."""
        self._sink.fail(error)

    def _finish(self, *tail: bytes) -> None:
        """End the sink; further tokens are ignored."""
        self._generation.disconnect()
        self._sink.end(*tail)
