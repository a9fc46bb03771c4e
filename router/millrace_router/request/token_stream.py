"""The stream that carries the tokens of one generation to its reader."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from millrace_router.errors import RouterError
from millrace_router.request.events import (
    Event,
    TokenEvent,
)


class Listener(Protocol):
    """Who is told of events at the moment they are sent; neither method may raise."""

    def hear(self, event: Event) -> None:
        """Take the next event."""

    def fail(self, error: RouterError) -> None:
        """Take the news that the generation has failed."""


class TokenStream:
    """Events of one generation, in order, for one reader, who iterates over them or listens.

    Ends exactly once: with a token that has a `Finished`, or with an error. `close` is the only abort there is.
    """

    def __init__(self) -> None:
        self.queued_at = time.monotonic()
        self.batched_at: float | None = None
        self.finished_at: float | None = None
        self.closed = False
        self.cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache when the request was first admitted."""
        self.predicted_queue_seconds: float | None = None
        """What was expected of the time until then, when the request came."""
        self._on_close: Callable[[], None] | None = None
        self._events: deque[Event] = deque()
        self._error: RouterError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Listener | None = None

    @property
    def ended(self) -> bool:
        """Whether the end has been sent."""
        return self.finished_at is not None

    def send(self, event: Event) -> None:
        """Hand an event to the reader, unless it has left; never blocks."""
        if isinstance(event, TokenEvent) and event.finished is not None:
            self._end()
        if self.closed:
            return
        if self._listener is None:
            self._events.append(event)
            self._wake()
        else:
            self._listener.hear(event)

    def fail(self, error: RouterError) -> None:
        """End the stream with `error`, after the events already sent."""
        if not self.ended:
            self._end()
            self._error = error
            if self._listener is None:
                self._wake()
            else:
                self._listener.fail(error)

    def listen(self, listener: Listener) -> None:
        """Tell `listener` what has been sent so far, and everything else as it is sent."""
        self._listener = listener
        while self._events:
            listener.hear(self._events.popleft())
        if self._error is not None:
            listener.fail(self._error)

    def when_closed(self, call: Callable[[], None]) -> None:
        """Call `call` should the reader leave before the end."""
        self._on_close = call

    def close(self) -> None:
        """Say that nobody reads any more. Idempotent; closing an ended stream changes nothing."""
        if self.closed:
            return
        self.closed = True
        # They refer to the stream as well: a request is to be freed when it has gone, not when the collector comes.
        self._listener = None
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._error is not None:
                raise self._error
            if self.ended or self.closed:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._events.popleft()

    def _end(self) -> None:
        self.finished_at = time.monotonic()
        self._on_close = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
