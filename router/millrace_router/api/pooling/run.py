"""Runs the prompts of one request: several at a time, and no more than leaves permits to others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

from millrace_router.engine.generation import Generation
from millrace_router.engine.usage import Usage
from millrace_router.errors import Overloaded, ValidationError
from millrace_router.pooling.prompts import Ids
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.token_stream import read_tokens
from millrace_router.server.services import Services
from millrace_router.text.tokenizer import TokenizerError

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Pooled(Generic[Result]):
    """The results of all prompts, in their order."""

    results: list[Result]
    generations: list[Generation]
    usage: Usage


@dataclass(slots=True, kw_only=True)
class PoolingRun(Generic[Result]):
    """The work of one request. A prompt is tokenized by its function on the tokenizer's threads."""

    services: Services
    asked: GenerationRequest
    """All but the prompt."""
    prompts: Sequence[Callable[[], Ids]]
    render: Callable[[Sequence[float]], Result]
    on_start: Callable[[Generation], None] = lambda _: None
    """Gets each generation once it has started."""
    _waiting: deque[int] = field(default_factory=deque)
    _num_workers: int = 0
    _done: dict[int, tuple[Generation, Result]] = field(default_factory=dict)

    async def finish(self) -> Pooled[Result]:
        """Run all prompts; raises the first RouterError, after which none goes on."""
        self._waiting.extend(range(len(self.prompts)))
        services = self.services
        # At least one worker asks for a permit, and is refused if there is none.
        num_workers = max(1, min(len(self.prompts), services.infer.permits.free // 2))
        self._num_workers = num_workers
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(num_workers):
                    group.create_task(self._work(services))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        done = [self._done[index] for index in range(len(self.prompts))]
        generations = [generation for generation, _ in done]
        usage = sum((one.usage(0) for one in generations), Usage())
        return Pooled([result for _, result in done], generations, usage)

    async def _work(self, services: Services) -> None:
        """Run prompts one after the other, until none is left."""
        following = await self._next(services)
        while following is not None:
            index, ids = following
            try:
                generation = await services.infer.start(replace(self.asked, prompt=ids))
            except Overloaded:
                self._num_workers -= 1
                if not self._num_workers:
                    raise
                # Others of this request go on, and take the prompt when they are done.
                self._waiting.append(index)
                return
            async with generation:
                self.on_start(generation)
                await read_tokens(generation, lambda _: True)
                self._done[index] = generation, self.render(generation.take_pooled())
                following = await self._next(services)
            # The permit goes back here, and `start` takes it again before any other task runs.
        self._num_workers -= 1

    async def _next(self, services: Services) -> tuple[int, Ids] | None:
        if not self._waiting:
            return None
        index = self._waiting.popleft()
        try:
            return index, await services.tokenizer.in_thread(self.prompts[index])
        except TokenizerError as error:
            raise ValidationError(f"tokenizer error {error}") from error


def text_or_ids(prompt: str | Ids, tokenize: Callable[[str], Ids]) -> Callable[[], Ids]:
    """Return the function of a prompt, which is a text or token ids already."""
    return partial(tokenize, prompt) if isinstance(prompt, str) else lambda: prompt
