"""Between routes and batcher: permits, validation, one generation or several of one prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Protocol

from millrace_router.api.native import GenerateRequest
from millrace_router.errors import Overloaded, RouterError, ShuttingDown, SizeError
from millrace_router.estimate import Appraisal, Estimate
from millrace_router.generation import Collected, EventStream, Generation, RequestRecord
from millrace_router.metrics import Metrics
from millrace_router.request import Terms, ValidRequest
from millrace_router.terms import DEFAULT_TERMS
from millrace_router.validation import (
    Validated,
    Validator,
    check_best_of,
    check_stream,
    random_seed,
)


class Batcher(Protocol):
    """Where valid requests go."""

    def submit(self, request: ValidRequest, /) -> EventStream:
        """Queue a request; raises RouterError."""

    def estimate(self, request: ValidRequest, /) -> Estimate:
        """What would become of a request that came now; it is not queued."""

    def drain_seconds(self) -> float:
        """Until there is room for one more request; 0 while nothing is known."""


SHORTEST = ValidRequest(input_ids=(0,), max_new_tokens=1)
"""The least that anyone may ask for."""


class Permits:
    """How many generations may be in the house at once; nobody waits for one."""

    def __init__(self, total: int, drain_seconds: Callable[[], float]) -> None:
        """`drain_seconds` says after how long one who is refused may come again."""
        self.free = total
        self._total = total
        self._drain_seconds = drain_seconds
        self._all_free = asyncio.Event()
        self._all_free.set()

    def take(self, count: int = 1) -> None:
        """Take `count` permits, or none and raise Overloaded."""
        if self.free < count:
            raise Overloaded(retry_after_seconds=self._drain_seconds())
        self.free -= count
        self._all_free.clear()

    def give(self, count: int = 1) -> None:
        """Give `count` permits back."""
        self.free += count
        assert self.free <= self._total
        if self.free == self._total:
            self._all_free.set()

    @property
    def taken(self) -> int:
        """How many generations are in the house."""
        return self._total - self.free

    async def all_free(self) -> None:
        """Wait until nothing runs."""
        await self._all_free.wait()


def ignore(_: RouterError) -> None:
    """Take no notice of a failure."""


def _nothing() -> None:
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
    ) -> None:
        self._batcher = batcher
        self._validator = validator
        self._metrics = metrics
        self._on_failure = on_failure
        self._on_token = on_token
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
        terms: Terms = DEFAULT_TERMS,
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
                request, terms=terms, add_special_tokens=add_special_tokens
            )
        except SizeError as error:
            return Appraisal(
                num_prompt_tokens=error.num_prompt_tokens,
                max_new_tokens=error.max_new_tokens,
                refusal=str(error),
                estimate=self._batcher.estimate(replace(SHORTEST, terms=terms)),
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
        terms: Terms = DEFAULT_TERMS,
        add_special_tokens: bool = True,
    ) -> Generation:
        """Validate and queue one generation, whose events are read as they come.

        Raises:
            RouterError: the server drains, is overloaded, or the request is not valid.

        """
        with self._accounted() as record:
            check_stream(request.parameters)
            return await self._start(
                request, record, terms=terms, add_special_tokens=add_special_tokens
            )

    async def generate(
        self,
        request: GenerateRequest,
        *,
        terms: Terms = DEFAULT_TERMS,
        add_special_tokens: bool = True,
    ) -> Collected:
        """Generate to the end; with `best_of` several times, of which the likeliest wins.

        Raises:
            RouterError: as for `start`, or the generation failed.

        """
        best_of = request.parameters.best_of or 1
        with self._accounted() as record:
            if best_of == 1:
                generation = await self._start(
                    request, record, terms=terms, add_special_tokens=add_special_tokens
                )
                async with generation:
                    return await generation.collect()
            check_best_of(request.parameters, self._validator.limits)
            collected = await self._best_of(
                request,
                record,
                best_of=best_of,
                terms=terms,
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
        terms: Terms,
        add_special_tokens: bool,
    ) -> Generation:
        self.permits.take()
        with ExitStack() as undo:
            undo.callback(self.permits.give)
            validated = await self._validator.validate(
                request, terms=terms, add_special_tokens=add_special_tokens
            )
            generation = self._submit(validated, record, counted=True)
            undo.pop_all()
        return generation

    async def _best_of(
        self,
        request: GenerateRequest,
        record: RequestRecord,
        *,
        best_of: int,
        terms: Terms,
        add_special_tokens: bool,
    ) -> Collected:
        """Submit all at once and read one after the other: their events wait in their streams."""
        with ExitStack() as cleanup:
            self.permits.take(best_of)
            cleanup.callback(self.permits.give, best_of)
            validated = await self._validator.validate(
                request, terms=terms, add_special_tokens=add_special_tokens
            )
            generations = []
            for _ in range(best_of):
                generation = self._submit(_reseeded(validated), record, counted=False)
                cleanup.callback(generation.close)
                generations.append(generation)
            collected = [await generation.collect() for generation in generations]
        best = max(collected, key=lambda one: one.mean_logprob)
        others = tuple(one for one in collected if one is not best)
        return replace(best, others=others)

    def _submit(self, validated: Validated, record: RequestRecord, *, counted: bool) -> Generation:
        """Queue; a counted generation owns its permit, the others' belong to their request."""
        return Generation(
            validated,
            self._batcher.submit(validated.request),
            record=record,
            counted=counted,
            release=self.permits.give if counted else _nothing,
        )


def _reseeded(validated: Validated) -> Validated:
    sampling = replace(validated.request.sampling, seed=random_seed())
    return replace(validated, request=replace(validated.request, sampling=sampling))
