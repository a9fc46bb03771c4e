"""A running generation and a complete one: their token counts, durations and metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from millrace_router.errors import RouterError, as_failure
from millrace_router.request.request import FinishReason, ValidRequest
from millrace_router.request.token_stream import (
    Finished,
    PromptLogprobs,
    TokenEvent,
    TokenSink,
    TokenStream,
    read_tokens,
)
from millrace_router.telemetry.metrics import Metrics
from millrace_router.telemetry.request_log import ProgressLog
from millrace_router.validation.validator import Validated


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one choice, or of several added up."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that were in the prefix cache."""
    reasoning_tokens: int | None = None
    """Tokens of the answer that belong to thoughts; None if the model's format does not separate thoughts from text."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            _sum(self.reasoning_tokens, other.reasoning_tokens),
        )


def _sum(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else one + other


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Durations of the parts of a request, in seconds."""

    arrived_at: float = 0.0
    """By `time.monotonic`."""
    total: float
    validation: float
    queue: float
    inference: float
    per_token: float
    predicted_queue: float | None = None
    """Prediction of `queue`; None if nothing was known."""
    first_token: float | None = None
    """From arrival until the first token was passed to its sink; None without a token."""


class RequestRecord:
    """Counts one request: each token when it arrives, and exactly one end."""

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
        """Return the record of another sample of the same request; it counts as a separate request."""
        other = RequestRecord(self._metrics, self._on_failure, self._on_token)
        other.arrived_at = self.arrived_at
        return other

    def token(self) -> None:
        """Count a token that is passed to its sink now."""
        now = time.monotonic()
        if self._last_token_at is None:
            self.first_token_at = now
            self._metrics.time_to_first_token_seconds.observe(now - self.arrived_at)
        else:
            self._metrics.inter_token_latency_seconds.observe(now - self._last_token_at)
        self._last_token_at = now
        self._on_token()

    def succeeded(self, timings: Timings, generated_tokens: int) -> None:
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
        error.is_counted = True
        if self._ended:
            return
        self._ended = True
        if error.failure_label is not None:
            self._metrics.request_failure.labels(err=error.failure_label).inc()
        self._on_failure(error)

    def left(self) -> None:
        """Count a client that disconnected before the end; without effect after the end."""
        if not self._ended:
            self._ended = True
            self._metrics.request_failure.labels(err="dropped").inc()


class Generation:
    """An accepted request: counts its tokens and its end, and passes them to one sink.

    As a context manager it closes the stream and releases its permit, also after an error.
    """

    def __init__(
        self,
        validated: Validated,
        stream: TokenStream,
        *,
        sample: int = 0,
        record: RequestRecord,
        counted: bool,
        release: Callable[[], None],
    ) -> None:
        self.valid: ValidRequest = validated.request
        self.inputs: str = validated.inputs
        self.sample = sample
        """Number among the samples of one prompt."""
        self._stream = stream
        self._record = record
        self._counted = counted
        self._release = release
        self._progress = ProgressLog(self.valid.max_new_tokens, lambda: self.generated_tokens)
        self._sink: TokenSink[TokenEvent] | None = None
        self._closed = False
        choice = self.valid.choice
        self._num_known = 0 if choice is None else len(choice.known)
        """Tokens that another router has counted."""
        self.generated_tokens = 0
        self.finish_reason: FinishReason | None = None
        """None while the generation runs, and if it fails or its client disconnects."""
        self.error_type: str | None = None
        """Type of the error that ended the generation."""

    @property
    def may_expire(self) -> bool:
        """Whether the request waits in the queue with a deadline."""
        stream = self._stream
        has_deadline = self.valid.scheduling.max_queue_seconds is not None
        return has_deadline and stream.batched_at is None and not stream.ended

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were in the prefix cache."""
        return self._stream.cached_tokens or 0

    def usage(self, num_tokens: int, reasoning_tokens: int | None = None) -> Usage:
        """Count the first `num_tokens` tokens; the prompt counts only with its first sample."""
        if self.sample:
            return Usage(0, num_tokens, 0, reasoning_tokens)
        num_prompt = len(self.valid.input_ids)
        return Usage(num_prompt, num_tokens, self.cached_tokens, reasoning_tokens)

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Log probabilities of the prompt, if the request wants them; known before the first token."""
        return self._stream.prompt_logprobs

    def take_pooled(self) -> Sequence[float]:
        """Take what the prompt of a pooled request yields, once, at its end."""
        values, self._stream.pooled = self._stream.pooled, None
        assert values is not None
        return values

    @property
    def times(self) -> Timings:
        """Durations until the end, or until now while the generation runs."""
        stream = self._stream
        end = stream.finished_at or time.monotonic()
        batched = stream.batched_at or end
        inference = end - batched
        return Timings(
            arrived_at=self._record.arrived_at,
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

    def connect(self, sink: TokenSink[TokenEvent]) -> None:
        """Pass all tokens to `sink`; an exception of its `token` goes to its `fail`."""
        self._sink = sink
        self._stream.connect(self)

    @property
    def ended(self) -> bool:
        """Whether no further token will come."""
        return self._stream.ended

    @property
    def is_connected(self) -> bool:
        """Whether there is a sink."""
        return self._stream.is_connected

    @property
    def num_held(self) -> int:
        """Tokens that are kept."""
        return self._stream.num_held

    def hold(self, on_token: Callable[[], None], on_connect: Callable[[], None]) -> None:
        """Keep all tokens until `release`; call `on_token` with each, and `on_connect` when there is a sink."""
        self._stream.hold(on_token, on_connect)

    def pass_on(self) -> bool:
        """Pass the oldest token on that is kept; False if none is."""
        return self._stream.pass_on()

    def release(self) -> None:
        """Pass on all tokens, and further ones when they come."""
        self._stream.release()

    def disconnect(self) -> None:
        """Pass nothing more to the sink; further tokens are still counted."""
        self._sink = None

    def token(self, event: TokenEvent) -> None:
        """Receive the next token from the stream; raises nothing."""
        self.generated_tokens = event.index
        if self._counted and event.index > self._num_known:
            self._record.token()
        if event.finished is not None:
            self.finish_reason = event.finished.finish_reason
            if self._counted:
                self._record.succeeded(self.times, event.index)
        if self._sink is None:
            return
        try:
            self._sink.token(event)
        except BaseException as error:  # noqa: BLE001
            # The caller is the batcher, which a defect of one request must not stop.
            self.fail(as_failure(error))

    def fail(self, error: Exception) -> None:
        """Receive a failure of the generation, or a defect of the sink; raises nothing."""
        if isinstance(error, RouterError):
            self.error_type = error.error_type
            self._record.failed(error)
        else:
            # The route that answers counts it.
            self._counted = False
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.fail(error)

    async def collect(self) -> Collected:
        """Wait for the end; raises RouterError."""
        tokens: list[TokenEvent] = []
        await read_tokens(self, tokens.append)
        finished = tokens[-1].finished
        assert finished is not None
        return Collected(
            valid=self.valid,
            inputs=self.inputs,
            tokens=tuple(tokens),
            prompt=self.prompt_logprobs,
            finished=finished,
            times=self.times,
            cached_tokens=self.cached_tokens,
        )

    def close(self) -> None:
        """Abort the generation unless it has ended, and release the permit. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._progress.close()
        self._stream.close()
        # An idle connection keeps its last request with all generations, which must not keep the answer in memory.
        self._sink = None
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
    sample: int = 0
    """Number among the samples of one prompt."""
    others: tuple[Collected, ...] = ()
    """With `best_of`: all samples except the best."""

    @property
    def usage(self) -> Usage:
        """Token counts of this sample, without the others."""
        return Usage(len(self.valid.input_ids), self.finished.generated_tokens, self.cached_tokens)

    @property
    def generated_tokens(self) -> int:
        return len(self.tokens)

    @property
    def finish_reason(self) -> FinishReason:
        return self.finished.finish_reason

    @property
    def mean_logprob(self) -> float:
        """Average log probability of the tokens, by which `best_of` ranks samples."""
        return sum(event.token.logprob for event in self.tokens) / len(self.tokens)
