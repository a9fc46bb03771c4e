"""A response as a stream of events, from one generation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import orjson

from millrace_router.api.openai.choice import ChoiceText
from millrace_router.api.openai.errors import usage_of
from millrace_router.api.responses.events import ResponseEvent, ResponseEvents
from millrace_router.engine.generation import Generation
from millrace_router.errors import RouterError
from millrace_router.request.events import TokenEvent
from millrace_router.server.sse import named_event
from millrace_router.server.stream_writer import Sink


class ResponseStream:
    """Frames what each token adds, one frame an event, so that each has a number to resume after.

    The first token brings the beginning with it: a request that fails before it gets its true status.
    """

    def __init__(self, generation: Generation, text: ChoiceText, events: ResponseEvents) -> None:
        self._generation = generation
        self._text = text
        self._events = events
        self._finished = False
        self._failure: bytes | None = None

    def feed(self, sink: Sink) -> None:
        """Send every event to `sink` from now on."""
        self._sink = sink
        self._generation.listen(self)

    def token(self, event: TokenEvent) -> None:
        """Take the next token."""
        if self._finished:
            return
        if not self._events.has_begun:
            self._send(self._events.begin())
        piece = self._text.push(event)
        self._send(self._events.push(piece))
        if piece.finish_reason is None:
            return
        self._finished = True
        usage = usage_of(self._generation, piece)
        self._sink.end(*_framed(self._events.end(usage, piece.finish_reason)))

    def fail(self, error: Exception) -> None:
        """Take the news that there will be no further token."""
        if not self._finished:
            self._sink.fail(error)

    def failure(self, error: RouterError) -> bytes:
        """Frame what a client that has been sent something is told of a failure; the same for each that reads it."""
        if self._failure is None:
            self._failure = b"".join(_framed(self._events.fail(error)))
        return self._failure

    def _send(self, events: Iterable[ResponseEvent]) -> None:
        for frame in _framed(events):
            self._sink.send(frame)


def _framed(events: Iterable[ResponseEvent]) -> Iterator[bytes]:
    return (named_event(event["type"], orjson.dumps(event)) for event in events)
