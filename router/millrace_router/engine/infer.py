"""Between routes and batcher: permits, validation, one generation or several of one prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Protocol

from millrace_router.engine.generation import Collected, Generation
from millrace_router.engine.permits import Permits
from millrace_router.engine.request_record import RequestRecord
from millrace_router.errors import RouterError, ShuttingDown, SizeError
from millrace_router.prediction.estimate import Appraisal, Estimate
from millrace_router.request.parameters import GenerateRequest
from millrace_router.request.request import SchedulingParameters, ValidRequest
from millrace_router.request.scheduling import DEFAULT_SCHEDULING
from millrace_router.request.seeds import seed_of_sample
from millrace_router.request.token_stream import TokenStream
from millrace_router.telemetry.metrics import Metrics
from millrace_router.validation.validator import Validated, Validator, check_best_of, check_stream


class Batcher(Protocol):
    """Where valid requests go."""

    def submit(self, request: ValidRequest, /) -> TokenStream:
        """Queue a request; raises RouterError."""

    def estimate(self, request: ValidRequest, /) -> Estimate:
        """What would become of a request that came now; it is not queued."""

    def drain_seconds(self) -> float:
        """Until there is room for one more request; 0 while nothing is known."""


SHORTEST = ValidRequest(input_ids=(0,), max_new_tokens=1)
"""The least that anyone may ask for."""


def ignore(_: RouterError) -> None:
    """Take no notice of a failure."""


def _nothing() -> None:
    pass


def _unseen(_: float) -> None:
    pass


class Infer:
    """Starts generations. Every permit taken is given back when its generation closes."""

    def __init__(
        self,
        batcher: Batcher,
        validator: Validator,
        metrics: Metrics,
        *,
        on_failure: Callable[[RouterError], None] = ignore,
        on_token: Callable[[], None] = _nothing,
        on_entry: Callable[[float], None] = _unseen,
    ) -> None:
        """`on_entry` is told how many seconds after its arrival a request was queued."""
        self._batcher = batcher
        self._validator = validator
        self._metrics = metrics
        self._on_failure = on_failure
        self._on_token = on_token
        self._on_entry = on_entry
        self._draining = False
        self.permits = Permits(validator.limits.max_concurrent_requests, batcher.drain_seconds)

    def drain(self) -> None:
        """Accept nothing from now on; what runs goes on."""
        self._draining = True

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    @contextmanager
    def permit(self) -> Iterator[None]:
        """Hold a permit for work that is not a generation; raises ShuttingDown or Overloaded."""
        if self._draining:
            raise ShuttingDown
        self.permits.take()
        try:
            yield
        finally:
            self.permits.give()

    async def estimate(
        self,
        request: GenerateRequest,
        *,
        scheduling: SchedulingParameters = DEFAULT_SCHEDULING,
        add_special_tokens: bool = True,
    ) -> Appraisal:
        """Tell of one generation of `request` without running it; a full server answers too.

        Raises:
            RouterError: as for `generate`, but for what does not fit.

        """
        if self._draining:
            raise ShuttingDown
        check_best_of(request.parameters, self._validator.limits)
        try:
            validated = await self._validator.check(
                request, scheduling=scheduling, add_special_tokens=add_special_tokens
            )
        except SizeError as error:
            return Appraisal(
                num_prompt_tokens=error.num_prompt_tokens,
                max_new_tokens=error.max_new_tokens,
                refusal=str(error),
                estimate=self._batcher.estimate(replace(SHORTEST, scheduling=scheduling)),
            )
        return Appraisal(
            num_prompt_tokens=len(validated.request.input_ids),
            max_new_tokens=validated.request.max_new_tokens,
            refusal=None,
            estimate=self._batcher.estimate(validated.request),
        )

    async def start(
        self,
        request: GenerateRequest,
        *,
        scheduling: SchedulingParameters = DEFAULT_SCHEDULING,
        add_special_tokens: bool = True,
    ) -> Generation:
        """Validate and queue one generation, whose events are read as they come; raises as `start_samples`."""
        (generation,) = await self.start_samples(
            request, 1, scheduling=scheduling, add_special_tokens=add_special_tokens
        )
        return generation

    async def start_samples(
        self,
        request: GenerateRequest,
        count: int,
        *,
        scheduling: SchedulingParameters = DEFAULT_SCHEDULING,
        add_special_tokens: bool = True,
    ) -> tuple[Generation, ...]:
        """Validate once, and queue `count` generations that differ in their seeds alone, or none.

        They share the full blocks of their prompt: the first computes them, and the others wait for it in the queue.
        Only the first tells the prompt's log probabilities.
        Each holds a permit, and each counts as a request in the metrics.

        Raises:
            RouterError: the server drains, is overloaded, or the request is not valid.

        """
        with self._accounted() as record:
            check_stream(request.parameters)
            return await self._start(
                request,
                record,
                count=count,
                scheduling=scheduling,
                add_special_tokens=add_special_tokens,
            )

    async def generate(
        self,
        request: GenerateRequest,
        *,
        scheduling: SchedulingParameters = DEFAULT_SCHEDULING,
        add_special_tokens: bool = True,
    ) -> Collected:
        """Generate to the end; with `best_of` several times, of which the likeliest wins.

        Raises:
            RouterError: as for `start`, or the generation failed.

        """
        best_of = request.parameters.best_of or 1
        with self._accounted() as record:
            if best_of == 1:
                (generation,) = await self._start(
                    request,
                    record,
                    count=1,
                    scheduling=scheduling,
                    add_special_tokens=add_special_tokens,
                )
                async with generation:
                    return await generation.collect()
            check_best_of(request.parameters, self._validator.limits)
            collected = await self._best_of(
                request,
                record,
                best_of=best_of,
                scheduling=scheduling,
                add_special_tokens=add_special_tokens,
            )
            record.succeeded(collected.times, collected.finished.generated_tokens)
            return collected

    @contextmanager
    def _accounted(self) -> Iterator[RequestRecord]:
        """Count a request from its arrival on, and its end if it ends in here."""
        if self._draining:
            raise ShuttingDown
        record = RequestRecord(self._metrics, self._on_failure, self._on_token)
        try:
            yield record
        except RouterError as error:
            record.failed(error)
            raise
        except asyncio.CancelledError:
            record.left()
            raise

    async def _start(
        self,
        request: GenerateRequest,
        record: RequestRecord,
        *,
        count: int,
        scheduling: SchedulingParameters,
        add_special_tokens: bool,
    ) -> tuple[Generation, ...]:
        self.permits.take(count)
        with ExitStack() as undo:
            undo.callback(self.permits.give, count)
            validated = await self._validator.validate(
                request, scheduling=scheduling, add_special_tokens=add_special_tokens
            )
            samples = _samples_of(validated, count)
            streams = self._submit(samples)
            undo.pop_all()
        self._on_entry(streams[0].queued_at - record.arrived_at)
        records = (record, *(record.sibling() for _ in samples[1:]))
        return tuple(
            Generation(
                sample,
                stream,
                sample=index,
                record=own,
                counted=True,
                release=self.permits.give,
            )
            for index, (sample, stream, own) in enumerate(
                zip(samples, streams, records, strict=True)
            )
        )

    async def _best_of(
        self,
        request: GenerateRequest,
        record: RequestRecord,
        *,
        best_of: int,
        scheduling: SchedulingParameters,
        add_special_tokens: bool,
    ) -> Collected:
        """Submit all at once and collect one after the other: tokens of the others wait in their streams."""
        with ExitStack() as cleanup:
            self.permits.take(best_of)
            cleanup.callback(self.permits.give, best_of)
            validated = await self._validator.validate(
                request, scheduling=scheduling, add_special_tokens=add_special_tokens
            )
            samples = _samples_of(validated, best_of)
            generations = [
                Generation(sample, stream, record=record, counted=False, release=_nothing)
                for sample, stream in zip(samples, self._submit(samples), strict=True)
            ]
            for generation in generations:
                cleanup.callback(generation.close)
            first, *rest = [await generation.collect() for generation in generations]
            collected = [first, *(replace(one, prompt=first.prompt) for one in rest)]
        best = max(collected, key=lambda one: one.mean_logprob)
        others = tuple(one for one in collected if one is not best)
        return replace(best, others=others)

    def _submit(self, samples: Sequence[Validated]) -> list[TokenStream]:
        """Queue all of them, or none; raises RouterError."""
        with ExitStack() as undo:
            streams = []
            for sample in samples:
                stream = self._batcher.submit(sample.request)
                undo.callback(stream.close)
                streams.append(stream)
            undo.pop_all()
        return streams


def _samples_of(validated: Validated, count: int) -> list[Validated]:
    """The same request as often as it is to be sampled, each time with a seed of its own.

    Only the first has the prompt scored, which is the same for all and would take each of them the whole prompt.
    """
    if count == 1:
        return [validated]
    request = validated.request
    return [
        replace(
            validated,
            request=replace(
                request,
                sampling=replace(
                    request.sampling, seed=seed_of_sample(request.sampling.seed, index)
                ),
                prefill_logprobs=request.prefill_logprobs and index == 0,
            ),
        )
        for index in range(count)
    ]
