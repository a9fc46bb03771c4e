"""One running generation as its route sees it, and one that has been collected whole."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from millrace_router.errors import IncompleteGeneration, RouterError
from millrace_router.request.events import Event, Finished, PromptLogprobs, TokenEvent
from millrace_router.request.request import FinishReason, ValidRequest
from millrace_router.request.token_stream import Listener
from millrace_router.telemetry.metrics import Metrics
from millrace_router.validation.validator import Validated


class EventStream(Protocol):
    """What the batcher answers with; times are of `time.monotonic`."""

    queued_at: float
    batched_at: float | None
    finished_at: float | None
    cached_tokens: int | None
    """Tokens of the prompt that were found computed; known once the request has left the queue."""
    predicted_queue_seconds: float | None

    def close(self) -> None:
        """Say that nobody reads any more."""

    def listen(self, listener: Listener) -> None:
        """Tell `listener` what has been sent so far, and everything else as it is sent."""

    def __aiter__(self) -> AsyncIterator[Event]:
        """Return the stream itself."""

    async def __anext__(self) -> Event:
        """Return the next event, at once if one is there or the stream has ended."""


class Reader(Protocol):
    """Who makes something of each token at the moment it is there."""

    def token(self, event: TokenEvent) -> None:
        """Take the next token."""

    def fail(self, error: Exception) -> None:
        """Take the news that there will be no further token: a RouterError, or a defect of `token`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where a request's time went, in seconds."""

    total: float
    validation: float
    queue: float
    inference: float
    per_token: float
    predicted_queue: float | None = None
    """What `queue` was expected to be; None if nothing was known."""
    first_token: float | None = None
    """From arrival until the first token was handed on; None if there was none."""


class RequestRecord:
    """Counts one request: its tokens as they come, then exactly one ending."""

    def __init__(
        self,
        metrics: Metrics,
        on_failure: Callable[[RouterError], None],
        on_token: Callable[[], None],
    ) -> None:
        self.arrived_at = time.monotonic()
        self._metrics = metrics
        self._on_failure = on_failure
        self._on_token = on_token
        self.first_token_at: float | None = None
        self._last_token_at: float | None = None
        self._ended = False
        metrics.request_count.inc()

    def sibling(self) -> RequestRecord:
        """Make the record of another sample of the same request, which counts as a request, too."""
        other = RequestRecord(self._metrics, self._on_failure, self._on_token)
        other.arrived_at = self.arrived_at
        return other

    def token(self) -> None:
        """Count a token that is handed to its reader now."""
        now = time.monotonic()
        if self._last_token_at is None:
            self.first_token_at = now
            self._metrics.time_to_first_token_seconds.observe(now - self.arrived_at)
        else:
            self._metrics.inter_token_latency_seconds.observe(now - self._last_token_at)
        self._last_token_at = now
        self._on_token()

    def succeeded(self, timings: Timings, generated_tokens: int) -> None:
        """Count a normal end."""
        self._ended = True
        self._on_token()
        metrics = self._metrics
        metrics.request_success.inc()
        metrics.request_duration.observe(timings.total)
        metrics.request_validation_duration.observe(timings.validation)
        metrics.request_queue_duration.observe(timings.queue)
        metrics.request_inference_duration.observe(timings.inference)
        metrics.request_mean_time_per_token_duration.observe(timings.per_token)
        metrics.request_generated_tokens.observe(generated_tokens)

    def failed(self, error: RouterError) -> None:
        """Count an error, once."""
        if self._ended:
            return
        self._ended = True
        if error.failure_label is not None:
            self._metrics.request_failure.labels(err=error.failure_label).inc()
        self._on_failure(error)

    def left(self) -> None:
        """Count a client that went before the end; nothing if the end has been."""
        if not self._ended:
            self._ended = True
            self._metrics.request_failure.labels(err="dropped").inc()


class Generation:
    """An accepted request and its events.

    As a context manager it closes the stream and gives its permit back, whatever happened inside.
    """

    def __init__(
        self,
        validated: Validated,
        stream: EventStream,
        *,
        record: RequestRecord,
        counted: bool,
        release: Callable[[], None],
    ) -> None:
        self.valid: ValidRequest = validated.request
        self.inputs: str = validated.inputs
        self._stream = stream
        self._record = record
        self._counted = counted
        self._release = release
        self._reader: Reader | None = None
        self._on_prompt: Callable[[PromptLogprobs], None] | None = None
        self._closed = False
        self.generated_tokens = 0
        self.finish_reason: FinishReason | None = None
        """None while it runs, and if it fails or its client leaves."""
        self.error_type: str | None = None
        """What it has failed with."""
        self._failed = False

    @property
    def ended(self) -> bool:
        """Whether all events are there: reading on will not wait."""
        return self._stream.finished_at is not None

    @property
    def may_expire(self) -> bool:
        """Whether it waits, and may be sent away for having waited too long."""
        stream = self._stream
        has_deadline = self.valid.terms.max_queue_seconds is not None
        return has_deadline and stream.batched_at is None and not self.ended

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were found computed."""
        return self._stream.cached_tokens or 0

    @property
    def times(self) -> Timings:
        """Durations until the end, or until now while there is none."""
        stream = self._stream
        end = stream.finished_at or time.monotonic()
        batched = stream.batched_at or end
        inference = end - batched
        return Timings(
            total=end - self._record.arrived_at,
            validation=stream.queued_at - self._record.arrived_at,
            queue=batched - stream.queued_at,
            inference=inference,
            per_token=inference / max(self.generated_tokens, 1),
            predicted_queue=stream.predicted_queue_seconds,
            first_token=self._seconds_to_first_token(),
        )

    def _seconds_to_first_token(self) -> float | None:
        first_token_at = self._record.first_token_at
        return None if first_token_at is None else first_token_at - self._record.arrived_at

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """Return the next event; raises RouterError if the generation failed."""
        try:
            event = await self._stream.__anext__()
        except StopAsyncIteration:
            if self.finish_reason is not None:
                raise
            raise self._fail(IncompleteGeneration()) from None
        except RouterError as error:
            raise self._fail(error) from None
        if isinstance(event, TokenEvent):
            self._count(event)
        return event

    def _count(self, event: TokenEvent) -> None:
        self.generated_tokens = event.index
        if self._counted:
            self._record.token()
        if event.finished is not None:
            self.finish_reason = event.finished.finish_reason
            if self._counted:
                self._record.succeeded(self.times, event.index)

    def _fail(self, error: RouterError) -> RouterError:
        self.error_type = error.error_type
        self._record.failed(error)
        return error

    def listen(
        self, reader: Reader, on_prompt: Callable[[PromptLogprobs], None] | None = None
    ) -> None:
        """Hand `reader` every token at the moment it is there, instead of having it iterate.

        `on_prompt` is told of the prompt's log probabilities, which come before the first token; it may not raise.
        """
        self._reader = reader
        self._on_prompt = on_prompt
        self._stream.listen(self)
        if self.ended and self.finish_reason is None:
            self.fail(IncompleteGeneration())

    def hear(self, event: Event) -> None:
        """Take an event from the stream; raises nothing."""
        reader = self._reader
        if reader is None:
            return
        if not isinstance(event, TokenEvent):
            if self._on_prompt is not None:
                self._on_prompt(event)
            return
        self._count(event)
        try:
            reader.token(event)
        except Exception as error:  # noqa: BLE001
            # The edge of the request: what calls is the batcher, which must not suffer.
            reader.fail(error)

    def fail(self, error: RouterError) -> None:
        """Take the stream's failure; raises nothing."""
        if self._reader is not None and not self._failed:
            self._failed = True
            self._reader.fail(self._fail(error))

    async def collect(self) -> Collected:
        """Read to the end; raises RouterError."""
        tokens: list[TokenEvent] = []
        prompt: PromptLogprobs | None = None
        finished: Finished | None = None
        async for event in self:
            if isinstance(event, PromptLogprobs):
                prompt = event
            else:
                tokens.append(event)
                finished = event.finished
        assert finished is not None
        return Collected(
            valid=self.valid,
            inputs=self.inputs,
            tokens=tuple(tokens),
            prompt=prompt,
            finished=finished,
            times=self.times,
            cached_tokens=self.cached_tokens,
        )

    def close(self) -> None:
        """Stop reading. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._stream.close()
        # It holds what has been sent, and an idle connection its last request with all generations.
        self._reader = self._on_prompt = None
        self._release()
        if self._counted:
            self._record.left()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """A generation that ended normally."""

    valid: ValidRequest
    inputs: str
    tokens: tuple[TokenEvent, ...]
    prompt: PromptLogprobs | None
    finished: Finished
    times: Timings
    cached_tokens: int
    others: tuple[Collected, ...] = ()
    """With `best_of`: the ones that were not the best."""

    @property
    def generated_tokens(self) -> int:
        """How many tokens there are."""
        return len(self.tokens)

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        return self.finished.finish_reason

    @property
    def mean_logprob(self) -> float:
        """Average log probability of the tokens, by which `best_of` judges."""
        return sum(event.token.logprob for event in self.tokens) / len(self.tokens)
