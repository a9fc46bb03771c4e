"""A response as a stream of events, from one generation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import orjson

from millrace_router.api.openai.choice import ChatDelta, ChoiceText
from millrace_router.api.openai.event_stream import EventStream
from millrace_router.api.responses.events import ResponseEvent, ResponseEvents
from millrace_router.engine.generation import Generation
from millrace_router.errors import RouterError
from millrace_router.server.sse import named_event


class ResponseStream(EventStream):
    """Frames a response."""

    def __init__(self, generation: Generation, text: ChoiceText, events: ResponseEvents) -> None:
        super().__init__(generation, text)
        self._events = events
        self._failure: bytes | None = None

    def failure(self, error: RouterError) -> bytes:
        """Frame a failure in mid-stream; the frame is the same for all connections that read the stream."""
        if self._failure is None:
            self._failure = b"".join(_framed(self._events.fail(error)))
        return self._failure

    def _begin(self) -> Iterator[bytes]:
        return _framed(self._events.begin())

    def _push(self, delta: ChatDelta) -> Iterator[bytes]:
        return _framed(self._events.push(delta))

    def _end(self, delta: ChatDelta, finish_reason: str) -> Iterator[bytes]:
        self._send(self._push(delta))
        usage = self._generation.usage(delta.num_tokens, self._text.reasoning_tokens)
        yield from _framed(self._events.end(usage, finish_reason))


def _framed(events: Iterable[ResponseEvent]) -> Iterator[bytes]:
    return (named_event(event["type"], orjson.dumps(event)) for event in events)
