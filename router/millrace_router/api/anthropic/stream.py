"""A message as a stream of events, from one generation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from millrace_router.api.anthropic.answers import MessageHead
from millrace_router.api.anthropic.events import MessageEvents, NamedJson
from millrace_router.api.openai.choice import ChatDelta, ChoiceText
from millrace_router.api.openai.event_stream import EventStream
from millrace_router.engine.generation import Generation
from millrace_router.server.sse import named_event


class MessageStream(EventStream):
    """Frames a message."""

    def __init__(self, generation: Generation, text: ChoiceText, head: MessageHead) -> None:
        super().__init__(generation, text)
        self._events = MessageEvents(head)

    def _begin(self) -> Iterator[bytes]:
        return _framed(self._events.start(self._generation.usage(0)))

    def _push(self, delta: ChatDelta) -> Iterator[bytes]:
        return _framed(self._events.push(delta))

    def _end(self, delta: ChatDelta, finish_reason: str) -> Iterator[bytes]:
        yield from _framed(self._events.push(delta))
        usage = self._generation.usage(delta.num_tokens)
        yield from _framed(self._events.finish(finish_reason, self._text.stop_sequence, usage))


def _framed(events: Iterable[NamedJson]) -> Iterator[bytes]:
    return (named_event(name, json) for name, json in events)
