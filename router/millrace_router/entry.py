"""A request inside the router, and the stream that carries its tokens home."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from millrace_router.block_keys import BlockKeys
from millrace_router.detokenizer import IncrementalDetokenizer
from millrace_router.errors import RouterError
from millrace_router.events import Event, Finished, PromptChunk, PromptLogprobs, Token, TokenEvent
from millrace_router.request import FinishReason, ValidRequest
from millrace_router.speculation import Acceptance
from millrace_router.stopping import StopMatcher
from millrace_router.tokenizer import Tokenizer

MOST_FORCED = 16
"""Tokens forced by a grammar that one step computes beside a sampled one: as many as a block has positions."""


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


class Entry:
    """One accepted request: what was asked, what has been generated, where the news goes.

    Prompt and generated ids are kept, so that a sequence can be admitted again as a prompt of everything so far.
    """

    def __init__(
        self,
        request_id: int,
        request: ValidRequest,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        *,
        block_size: int,
    ) -> None:
        self.request_id = request_id
        self.request = request
        self.terms = request.terms
        self.max_new_tokens = request.max_new_tokens
        self.num_prompt_tokens = len(request.input_ids)
        self.num_preemptions = 0
        self.accounted = False
        """Whether the scheduler has taken note of its end."""
        self.wants_prompt_logprobs = request.prefill_logprobs
        self.most_forced = 0 if request.grammar is None else MOST_FORCED
        self.acceptance = Acceptance()
        self.stream = TokenStream()
        self.generated_ids: list[int] = []
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset() if request.ignore_eos else eos_token_ids
        self._text = IncrementalDetokenizer(tokenizer, request.input_ids)
        self._stop = StopMatcher(request.stop_sequences) if request.stop_sequences else None
        self._prompt_logprobs = array("f")
        self._prompt_candidates = array("I"), array("f")
        self._block_keys = BlockKeys(block_size)

    @property
    def queued_at(self) -> float:
        """When it was accepted, by `time.monotonic`."""
        return self.stream.queued_at

    @property
    def tenant(self) -> str:
        """Whose share of the tokens it takes."""
        return self.terms.tenant

    @property
    def closed(self) -> bool:
        """Whether its reader has left."""
        return self.stream.closed

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.generated_ids)

    @property
    def num_inputs(self) -> int:
        """Tokens of the prompt, and those generated so far."""
        return self.num_prompt_tokens + len(self.generated_ids)

    def block_keys(self, count: int) -> Sequence[bytes]:
        """Keys of the first `count` full blocks of prompt and generated tokens."""
        return self._block_keys.first(count, self.request.input_ids, self.generated_ids)

    def admitted(self, now: float, num_cached: int) -> None:
        """Take note of joining the batch, for the first time or again, with so many tokens cached."""
        if self.stream.batched_at is None:
            self.stream.batched_at = now
            self.stream.cached_tokens = num_cached
        self._forget_prompt_logprobs()

    def accept_prompt_logprobs(self, chunk: PromptChunk) -> None:
        """Collect a chunk's log probabilities; send them once the prompt is complete."""
        self._prompt_logprobs.extend(chunk.logprobs)
        candidate_ids, candidate_logprobs = self._prompt_candidates
        candidate_ids.extend(chunk.candidate_ids)
        candidate_logprobs.extend(chunk.candidate_logprobs)
        ids = self.request.input_ids
        if len(self._prompt_logprobs) == len(ids):
            self.wants_prompt_logprobs = False
            prompt = PromptLogprobs(ids, tuple(self._prompt_logprobs), *self._prompt_candidates)
            self._forget_prompt_logprobs()
            self.stream.send(prompt)

    def _forget_prompt_logprobs(self) -> None:
        self._prompt_logprobs = array("f")
        self._prompt_candidates = array("I"), array("f")

    def accept(self, token_id: int, logprob: float, top: Sequence[tuple[int, float]]) -> bool:
        """Take the next token, send its event, and say whether the generation has ended with it."""
        self.generated_ids.append(token_id)
        count = len(self.generated_ids)
        text = self._text.step(token_id)
        reason = self._finish_reason(token_id, text)
        finished: Finished | None = None
        if reason is not None:
            text += self._text.flush()
            seed = self.request.sampling.seed if self.request.sampling.samples else None
            finished = Finished(reason, self._text.final_text(), count, seed)
        top_tokens = tuple([self._token(*candidate) for candidate in top]) if top else ()
        token = Token(token_id, text, logprob, self._tokenizer.is_special(token_id))
        self.stream.send(TokenEvent(count, token, top_tokens, finished))
        return finished is not None

    def _finish_reason(self, token_id: int, text: str) -> FinishReason | None:
        """TGI's order: length before end of sequence before stop sequence."""
        matched = self._stop is not None and self._stop.push(text) is not None
        if len(self.generated_ids) >= self.request.max_new_tokens:
            return FinishReason.LENGTH
        if token_id in self._eos_token_ids:
            return FinishReason.EOS_TOKEN
        return FinishReason.STOP_SEQUENCE if matched else None

    def _token(self, token_id: int, logprob: float) -> Token:
        tokenizer = self._tokenizer
        return Token(
            token_id, tokenizer.token_text(token_id), logprob, tokenizer.is_special(token_id)
        )
