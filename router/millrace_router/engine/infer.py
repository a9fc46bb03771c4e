"""From a request's parameters to generations: permits, validation, and one or several samples of one prompt."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

from millrace_router.adapters.resolver import Resolver
from millrace_router.engine.generation import Collected, Generation, RequestRecord
from millrace_router.errors import (
    AdapterNotFound,
    AdapterRemoved,
    Overloaded,
    RouterError,
    ShuttingDown,
    SizeError,
)
from millrace_router.prediction.forecast import Appraisal, Estimate
from millrace_router.request.adapter import AdapterVersion
from millrace_router.request.continuation import Answer
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.request import ValidRequest, seed_of_sample
from millrace_router.request.token_stream import TokenStream
from millrace_router.telemetry.metrics import Metrics
from millrace_router.validation.rules import check_best_of, check_stream
from millrace_router.validation.validator import Validated, Validator


class Batcher(Protocol):
    """Queues valid requests."""

    def submit(self, request: ValidRequest, /) -> TokenStream:
        """Queue a request; raises RouterError."""

    def estimate(self, request: ValidRequest, /) -> Estimate:
        """Predict the times of a request that arrived now; it is not queued."""

    def drain_seconds(self) -> float:
        """Predicted seconds until one more request fits; 0 while nothing is known."""


RESERVE = 8
"""One permit in this many is kept from a tenant that has all others."""
MAX_ASIDE = 4
"""Texts that are tokenized or estimated at a time without being generated from."""
MAX_LINE_ASIDE = 64
"""Such texts that are at work or wait."""


class Permits:
    """Counts the permits for generations; a request without one is refused at once."""

    def __init__(self, total: int, drain_seconds: Callable[[], float]) -> None:
        """`drain_seconds` predicts the seconds after which a refused client may retry."""
        self.free = total
        self.total = total
        self._drain_seconds = drain_seconds
        self._tenants: Counter[str] = Counter()
        self._all_free = asyncio.Event()
        self._all_free.set()

    def take(self, count: int = 1, tenant: str | None = None) -> None:
        """Take `count` permits, or none and raise Overloaded; a `tenant` cannot have the reserve for others."""
        if self.free < count:
            raise Overloaded(retry_after_seconds=self._drain_seconds())
        if tenant is not None:
            if self._tenants[tenant] + count > self.total - self.total // RESERVE:
                raise Overloaded(
                    "Model is overloaded by requests of this tenant",
                    retry_after_seconds=self._drain_seconds(),
                )
            self._tenants[tenant] += count
        self.free -= count
        self._all_free.clear()

    def take_anyway(self) -> None:
        """Take a permit for what another router has accepted, also if none is free."""
        self.free -= 1
        self._all_free.clear()

    def give(self, count: int = 1, tenant: str | None = None) -> None:
        self.free += count
        assert self.free <= self.total
        if tenant is not None:
            self._tenants[tenant] -= count
            if not self._tenants[tenant]:
                del self._tenants[tenant]
        if self.free == self.total:
            self._all_free.set()

    @property
    def taken(self) -> int:
        return self.total - self.free

    async def all_free(self) -> None:
        """Wait until no permit is taken."""
        await self._all_free.wait()


SHORTEST = ValidRequest(input_ids=(0,), max_new_tokens=1)
"""The smallest valid request."""


def noop(*_: object) -> None:
    """Do nothing."""


async def no_room(_: int) -> None:
    """Free no permit."""


class Infer:
    """Starts generations. Every permit is released when its generation closes."""

    def __init__(  # noqa: PLR0913
        self,
        batcher: Batcher,
        validator: Validator,
        metrics: Metrics,
        *,
        adapters: Resolver | None = None,
        by_adapter: bool = False,
        by_tenant: bool = False,
        on_failure: Callable[[RouterError], None] = noop,
        on_token: Callable[[], None] = noop,
        on_entry: Callable[[float], None] = noop,
    ) -> None:
        """Without `adapters` there are none; with `by_adapter` each is a tenant; with `by_tenant` each has a share.

        `on_entry` receives the seconds from the arrival of a request until it was queued.
        """
        self._batcher = batcher
        self._validator = validator
        self._metrics = metrics
        self._adapters = adapters
        self._by_adapter = by_adapter
        self._by_tenant = by_tenant
        self._on_failure = on_failure
        self._on_token = on_token
        self._on_entry = on_entry
        self._leaving = False
        self._draining = False
        self._digests: Counter[str] = Counter()
        self.permits = Permits(validator.limits.max_concurrent_requests, batcher.drain_seconds)
        self.make_room: Callable[[int], Awaitable[None]] = no_room
        """Ends generations without readers, to free so many permits."""
        self._aside = asyncio.Semaphore(MAX_ASIDE)
        self.line_aside = Permits(MAX_LINE_ASIDE, batcher.drain_seconds)
        """Places in the line for the turns aside."""

    def adapters_in_use(self) -> frozenset[str]:
        """Return the digests of the adapters of all requests that are not closed."""
        return frozenset(self._digests)

    def leave(self) -> None:
        """Let the probes report from now on that the server goes away; new requests are still accepted."""
        self._leaving = True

    def drain(self) -> None:
        """Refuse new requests from now on; running ones continue."""
        self._draining = True

    @property
    def draining(self) -> bool:
        """Whether new requests are refused, or soon will be."""
        return self._leaving or self._draining

    @asynccontextmanager
    async def permit(self, count: int = 1) -> AsyncIterator[None]:
        """Hold permits for work that is not a generation, or that precedes one; raises ShuttingDown or Overloaded.

        A generation that starts right after the block, without an await between, gets the same permits.
        """
        if self._draining:
            raise ShuttingDown
        await self._take(count)
        try:
            yield
        finally:
            self.permits.give(count)

    @asynccontextmanager
    async def turn_aside(self, *, takes_permit: bool = True) -> AsyncIterator[None]:
        """Hold one of the few turns for work that is not a generation, and a permit: a full server refuses it.

        Estimates take none, since a full server answers them too. Raises ShuttingDown, or Overloaded also if too many
        wait for their turn.
        """
        if self._draining:
            raise ShuttingDown
        self.line_aside.take()
        try:
            async with AsyncExitStack() as turn:
                await turn.enter_async_context(self._aside)
                if takes_permit:
                    await turn.enter_async_context(self.permit())
                yield
        finally:
            self.line_aside.give()

    async def _take(self, count: int, tenant: str | None = None) -> None:
        """Take permits, if need be from generations without readers; raises Overloaded."""
        if self.permits.free < count:
            await self.make_room(count - self.permits.free)
        self.permits.take(count, tenant)

    async def estimate(self, request: GenerationRequest) -> Appraisal:
        """Predict one generation of `request` without running it; a full server answers too.

        Raises:
            RouterError: as for `generate`, except that a request which does not fit gets an answer.

        """
        if self._draining:
            raise ShuttingDown
        check_best_of(request, self._validator.limits)
        try:
            validated = await self._adapted(request, await self._validator.check(request))
        except SizeError as error:
            return Appraisal(
                num_prompt_tokens=error.num_prompt_tokens,
                max_new_tokens=error.max_new_tokens,
                refusal=str(error),
                estimate=self._batcher.estimate(replace(SHORTEST, scheduling=request.scheduling)),
            )
        return Appraisal(
            num_prompt_tokens=len(validated.request.input_ids),
            max_new_tokens=validated.request.max_new_tokens,
            refusal=None,
            estimate=self._batcher.estimate(validated.request),
        )

    @contextmanager
    def accepted(
        self, submit: Callable[[ValidRequest], TokenStream], request: ValidRequest
    ) -> Iterator[TokenStream]:
        """Run a request that another router has accepted; raises RouterError if `submit` does."""
        self.permits.take_anyway()
        version = request.adapter
        if version is not None:
            self._digests[version.digest] += 1
        try:
            stream = submit(request)
            try:
                yield stream
            finally:
                stream.close()
        finally:
            self._release(version, None)

    async def start(self, request: GenerationRequest) -> Generation:
        """Validate and queue one generation; raises as `start_samples`."""
        (generation,) = await self.start_samples(request, 1)
        return generation

    async def start_samples(self, request: GenerationRequest, count: int) -> tuple[Generation, ...]:
        """Validate once, and queue `count` generations that differ only in their seeds, or none.

        They share the full blocks of their prompt: the first computes them, and the others wait for it in the queue.
        Only the first has the prompt's log probabilities. Each holds a permit, and counts as a request in the metrics.

        Raises:
            RouterError: the server drains, is overloaded, or the request is not valid.

        """
        with self._accounted() as record:
            check_stream(request)
            return await self._start(request, record, count=count, counted=True)

    async def generate(self, request: GenerationRequest) -> Collected:
        """Generate to the end; with `best_of` return the likeliest of several samples.

        Raises:
            RouterError: as for `start`, or the generation failed.

        """
        best_of = request.best_of or 1
        with self._accounted() as record, ExitStack() as cleanup:
            if best_of > 1:
                check_best_of(request, self._validator.limits)
            generations = await self._start(request, record, count=best_of, counted=best_of == 1)
            for generation in generations:
                cleanup.callback(generation.close)
            # Tokens of the others wait in their streams.
            collected = [await generation.collect() for generation in generations]
            if best_of == 1:
                return collected[0]
            best = _best_of(collected)
            record.succeeded(best.times, best.finished.generated_tokens)
            return best

    @contextmanager
    def _accounted(self) -> Iterator[RequestRecord]:
        """Count a request from its arrival on, and its end if it ends within the block."""
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
        self, request: GenerationRequest, record: RequestRecord, *, count: int, counted: bool
    ) -> tuple[Generation, ...]:
        """Queue `count` samples; with `counted` each counts as a request in the metrics."""
        tenant = request.scheduling.tenant if self._by_tenant else None
        await self._take(count, tenant)
        with ExitStack() as undo:
            undo.callback(self.permits.give, count, tenant)
            validated = await self._adapted(request, await self._validator.validate(request))
            if validated.request.adapter is not None:
                self._metrics.adapter_requests.count(validated.request.adapter.name)
            samples = _recorded(_samples_of(validated, count), request.answer)
            streams = self._submit(samples)
            undo.pop_all()
        self._on_entry(streams[0].queued_at - record.arrived_at)
        version = validated.request.adapter
        if version is not None:
            self._digests[version.digest] += count
        return tuple(
            Generation(
                sample,
                stream,
                sample=index,
                record=record.sibling() if counted and index else record,
                counted=counted,
                release=partial(self._release, version, tenant),
            )
            for index, (sample, stream) in enumerate(zip(samples, streams, strict=True))
        )

    def _release(self, version: AdapterVersion | None, tenant: str | None) -> None:
        """Give a permit back, and the use of an adapter."""
        self.permits.give(1, tenant)
        if version is not None:
            self._digests[version.digest] -= 1
            if not self._digests[version.digest]:
                del self._digests[version.digest]

    async def _adapted(self, request: GenerationRequest, validated: Validated) -> Validated:
        """Give a request the version of its adapter; raises RouterError."""
        reference = request.adapter
        if reference is None:
            return validated
        try:
            if self._adapters is None:
                raise AdapterNotFound(reference.name)
            version = await self._adapters.resolve(reference, request.scheduling.client)
        except AdapterRemoved:
            raise
        except AdapterNotFound:
            if self._validator.limits.dialect.ignores_adapters:
                return validated
            raise
        adapted = replace(validated.request, adapter=version)
        if self._by_adapter:
            scheduling = replace(adapted.scheduling, tenant=version.name)
            adapted = replace(adapted, scheduling=scheduling)
        return replace(validated, request=adapted)

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


def _best_of(collected: Sequence[Collected]) -> Collected:
    """Return the likeliest sample, with the others in `others`; all get the prompt's log probabilities of the first."""
    scored = [replace(one, prompt=collected[0].prompt) for one in collected]
    best = max(scored, key=lambda one: one.mean_logprob)
    return replace(best, others=tuple(one for one in scored if one is not best))


def _recorded(samples: list[Validated], answer: Answer | None) -> list[Validated]:
    """Give each sample its choice of the answer, if that is recorded."""
    if answer is None:
        return samples
    return [
        replace(one, request=replace(one.request, choice=answer.next_choice())) for one in samples
    ]


def _samples_of(validated: Validated, count: int) -> list[Validated]:
    """Copy the request `count` times, each copy with its own seed.

    Only the first copy wants the log probabilities of the prompt: they are the same for all, and require that the
    whole prompt is computed.
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
