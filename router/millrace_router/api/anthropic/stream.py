"""A message as a stream of events, from one generation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from millrace_router.api.anthropic.answers import MessageHead
from millrace_router.api.anthropic.events import MessageEvents, NamedJson
from millrace_router.api.openai.answers import Usage
from millrace_router.api.openai.choice import ChoiceText
from millrace_router.api.openai.errors import usage_of
from millrace_router.engine.generation import Generation
from millrace_router.request.events import TokenEvent
from millrace_router.server.sse import named_event
from millrace_router.server.stream_writer import Sink


class MessageStream:
    """Frames what each token adds; many add nothing, and the first comes with the start of the message.

    Each event is a frame of its own, so that each has a number to resume after.
    """

    def __init__(self, generation: Generation, text: ChoiceText, head: MessageHead) -> None:
        self._generation = generation
        self._text = text
        self._events = MessageEvents(head)
        self._started = False
        self._finished = False

    def feed(self, sink: Sink) -> None:
        """Send every event to `sink` from now on."""
        self._sink = sink
        self._generation.listen(self)

    def token(self, event: TokenEvent) -> None:
        """Take the next token."""
        if self._finished:
            return
        if not self._started:
            self._started = True
            self._send(self._events.start(self._usage_of_prompt()))
        piece = self._text.push(event)
        if piece.finish_reason is None:
            self._send(self._events.push(piece))
            return
        self._finished = True
        usage = usage_of(self._generation, piece)
        self._sink.end(
            *_framed(self._events.push(piece)),
            *_framed(self._events.finish(piece.finish_reason, self._text.stop_sequence, usage)),
        )

    def fail(self, error: Exception) -> None:
        """Take the news that there will be no further token."""
        if not self._finished:
            self._sink.fail(error)

    def _send(self, events: Iterable[NamedJson]) -> None:
        for frame in _framed(events):
            self._sink.send(frame)

    def _usage_of_prompt(self) -> Usage:
        generation = self._generation
        return Usage(len(generation.valid.input_ids), 0, cached_tokens=generation.cached_tokens)


def _framed(events: Iterable[NamedJson]) -> Iterator[bytes]:
    return (named_event(name, json) for name, json in events)
