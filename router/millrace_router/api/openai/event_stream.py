"""The base of streams whose events have names: OpenAI's responses and Anthropic's messages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from millrace_router.api.openai.choice import ChatDelta, ChoiceText
from millrace_router.engine.generation import Generation
from millrace_router.request.events import TokenEvent
from millrace_router.server.generation_stream import GenerationStream


class EventStream(GenerationStream):
    """Frames what each token adds, one frame an event, so that each event has a number to resume after.

    The first token brings the beginning with it: a request that fails before it gets its true status.
    """

    def __init__(self, generation: Generation, text: ChoiceText) -> None:
        super().__init__(generation)
        self._text = text
        self._has_begun = False

    @abstractmethod
    def _begin(self) -> Iterable[bytes]:
        """Frame the events before everything else."""

    @abstractmethod
    def _push(self, delta: ChatDelta) -> Iterable[bytes]:
        """Frame the events of a token that is not the last one."""

    @abstractmethod
    def _end(self, delta: ChatDelta, finish_reason: str) -> Iterable[bytes]:
        """Frame the events of the last token and of the end."""

    def token(self, event: TokenEvent) -> None:
        """Frame what the token adds, which often is nothing."""
        if not self._has_begun:
            self._has_begun = True
            self._send(self._begin())
        delta = self._text.push(event)
        if delta.finish_reason is None:
            self._send(self._push(delta))
        else:
            self._finish(*self._end(delta, delta.finish_reason))

    def _send(self, frames: Iterable[bytes]) -> None:
        for frame in frames:
            self._sink.token(frame)
