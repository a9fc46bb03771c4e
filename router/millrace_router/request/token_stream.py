"""The tokens of one generation, and the stream that carries them to their sink."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from millrace_router.errors import IncompleteGeneration, RouterError
from millrace_router.request.request import FinishReason


@dataclass(slots=True)
class Token:
    """One token with its log probability and the text that it adds."""

    id: int
    text: str
    logprob: float
    special: bool


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Log probabilities of consecutive tokens of a prompt; the first token of a prompt has NaN.

    Each token has the same number of candidates, the likeliest tokens in its place, most likely first. The candidates
    of all tokens are in one flat column.
    """

    logprobs: Sequence[float]
    candidate_ids: Sequence[int] = ()
    candidate_logprobs: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """`PromptChunk` of a whole prompt."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    candidate_ids: Sequence[int] = ()
    candidate_logprobs: Sequence[float] = ()

    def candidates(self, index: int) -> Iterator[tuple[int, float]]:
        """Return ids and log probabilities of the candidates of one token."""
        count = len(self.candidate_ids) // len(self.ids)
        part = slice(index * count, (index + 1) * count)
        return zip(self.candidate_ids[part], self.candidate_logprobs[part], strict=True)


@dataclass(frozen=True, slots=True)
class Finished:
    """The normal end of a generation."""

    finish_reason: FinishReason
    generated_text: str
    """Without special tokens, with a matched stop sequence."""
    generated_tokens: int
    seed: int | None
    """The seed, if the generation sampled."""


@dataclass(slots=True)
class TokenEvent:
    """One generated token; `index` counts from 1 without gap; 0: the end of a request that generates none."""

    index: int
    token: Token
    top_tokens: tuple[Token, ...] = ()
    finished: Finished | None = None
    """Set with the last token, and only there."""


def end_without_token() -> TokenEvent:
    """Return the end of a request that generates none."""
    finished = Finished(FinishReason.LENGTH, "", 0, None)
    return TokenEvent(0, Token(0, "", 0.0, special=True), (), finished)


Item_contra = TypeVar("Item_contra", contravariant=True)


class TokenSink(Protocol[Item_contra]):
    """Receives the tokens of one generation in order; on the way to the socket they become frames.

    No method blocks. `fail` raises nothing, and only the first end counts.
    """

    def token(self, item: Item_contra, /) -> None:
        """Take the next token, or the frame that it became."""

    def fail(self, error: Exception, /) -> None:
        """End without a further token, because of `error`."""


class TokenSource(Protocol):
    """A generation whose tokens one sink may receive."""

    def connect(self, sink: TokenSink[TokenEvent], /) -> None:
        """Hand all tokens to `sink`, the ones that are there at once."""


class TokenStream:
    """Tokens of one generation, in order, for one sink.

    The stream ends exactly once: with a token that has a `Finished`, or with an error. `close` is the only abort.
    Times are of `time.monotonic`.
    """

    def __init__(self) -> None:
        self.queued_at = time.monotonic()
        self.batched_at: float | None = None
        self.finished_at: float | None = None
        self.closed = False
        self.cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache when the request was first admitted."""
        self.predicted_queue_seconds: float | None = None
        """Prediction of the time until the first admission, made when the request came."""
        self.prompt_logprobs: PromptLogprobs | None = None
        """Set before the first token, if the request wants them."""
        self.pooled: Sequence[float] | None = None
        """Set before the end of a request that is pooled."""
        self._on_close: Callable[[], None] | None = None
        self._sink: TokenSink[TokenEvent] | None = None
        self._early: deque[TokenEvent] = deque()
        """Tokens that came before the sink, or are held."""
        self._held_sink: TokenSink[TokenEvent] | None = None
        self._on_held: Callable[[], None] | None = None
        self._on_connect: Callable[[], None] | None = None
        self._has_passed_end = False
        self._error: RouterError | None = None

    @property
    def ended(self) -> bool:
        """Whether the last token or an error has been sent."""
        return self.finished_at is not None

    def token(self, event: TokenEvent) -> None:
        """Hand a token to the sink, or keep it until there is one."""
        if event.finished is not None:
            self._end()
        if self._sink is not None:
            self._sink.token(event)
        elif not self.closed:
            self._early.append(event)
            if self._on_held is not None:
                self._on_held()

    def fail(self, error: RouterError) -> None:
        """End the stream with `error`, after the tokens already sent."""
        if self.ended:
            return
        self._end()
        self._error = error
        if self._sink is not None:
            self._sink.fail(error)
        elif self._on_held is not None:
            self.release()

    def connect(self, sink: TokenSink[TokenEvent]) -> None:
        """Hand all tokens to `sink`, which must not raise."""
        self._held_sink = sink
        if self._on_held is None:
            self.release()
        elif self._on_connect is not None:
            self._on_connect()

    @property
    def is_connected(self) -> bool:
        """Whether there is a sink."""
        return self._sink is not None or self._held_sink is not None

    @property
    def num_held(self) -> int:
        """Tokens that are kept."""
        return len(self._early)

    def hold(self, on_token: Callable[[], None], on_connect: Callable[[], None]) -> None:
        """Keep tokens until `release` or an error; call `on_token` with each, and `on_connect` when there is a sink."""
        self._on_held, self._on_connect = on_token, on_connect

    def pass_on(self) -> bool:
        """Hand the oldest token that is held to the sink; False if none is."""
        if not self._early or self._held_sink is None:
            return False
        event = self._early.popleft()
        self._has_passed_end = event.finished is not None
        self._held_sink.token(event)
        return True

    def release(self) -> None:
        """Hand all tokens to the sink that is connected, and further ones when they come."""
        sink, self._held_sink, self._on_held, self._on_connect = self._held_sink, None, None, None
        if sink is None:
            return
        self._sink = sink
        has_ended = self._has_passed_end
        while self._early:
            event = self._early.popleft()
            has_ended = event.finished is not None
            sink.token(event)
        if self._error is not None:
            sink.fail(self._error)
        elif self.ended and not has_ended:
            sink.fail(IncompleteGeneration())

    def when_closed(self, call: Callable[[], None]) -> None:
        """Call `call` if the stream is closed before its end."""
        self._on_close = call

    def close(self) -> None:
        """Abort the generation. Idempotent; closing an ended stream changes nothing."""
        if self.closed:
            return
        self.closed = True
        # The sink refers to the stream as well: without the cycle a request is freed at once.
        self._sink = self._held_sink = self._on_held = self._on_connect = None
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def _end(self) -> None:
        self.finished_at = time.monotonic()
        self._on_close = None


class _Collector:
    """The sink of an answer in one piece."""

    def __init__(self, take: Callable[[TokenEvent], bool | None]) -> None:
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._take = take

    def token(self, event: TokenEvent) -> None:
        if not self.ended.done() and (self._take(event) or event.finished is not None):
            self.ended.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_result(error)


async def read_tokens(source: TokenSource, take: Callable[[TokenEvent], bool | None]) -> None:
    """Call `take` with each token, until the last one or until `take` returns True.

    Raises:
        RouterError: the generation failed.

    """
    collector = _Collector(take)
    source.connect(collector)
    error = await collector.ended
    if error is not None:
        raise error
