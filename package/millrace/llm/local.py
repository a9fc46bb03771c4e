"""A model in this process: requests go to the router's core, without HTTP."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

from millrace.errors import RequestError
from millrace.llm.deployment import LocalModel
from millrace.llm.outputs import Piece, Prompt
from millrace.llm.params import SamplingParams
from millrace_router.adapters.names import check_name
from millrace_router.api.body.reading import Model, checked
from millrace_router.api.chat.choice import ChoiceText, reader
from millrace_router.api.chat.start import ChatRun, run_chat
from millrace_router.api.openai.render import chat_answer, chat_renderer
from millrace_router.api.openai.request import ChatCompletionRequest, CompletionRequest
from millrace_router.api.pooling.protocol import EmbeddingsRequest, ScoreRequest
from millrace_router.api.pooling.run import PoolingInput, embedding_run, score_run, sigmoid
from millrace_router.engine.generation import Generation
from millrace_router.errors import RouterError, ValidationError
from millrace_router.request.adapter import AdapterReference
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.request import Task
from millrace_router.request.token_stream import TokenEvent
from millrace_router.validation.rules import check_task

WITHOUT_PLACE = ("echo", "best_of", "prompt_logprobs")
"""Fields of text completions whose answers pieces cannot have."""


class Local:
    """A `Backend` over a `LocalModel` of this process."""

    def __init__(self, deployment: LocalModel) -> None:
        self._deployment = deployment
        self._services = deployment.services

    @property
    def max_requests(self) -> int:
        return self._services.config.max_concurrent_requests

    async def complete(self, prompt: Prompt, params: SamplingParams) -> AsyncGenerator[Piece, None]:
        services = self._services
        with _typed(), ExitStack() as cleanup:
            text = prompt if isinstance(prompt, str) else list(prompt)
            body = self._read({**params.body(), "prompt": text}, CompletionRequest)
            body.check(services.limits)
            _check(body)
            request = replace(
                body.generation(services.dialect),
                prompt=prompt,
                adapter=self._adapter(body.model),
            )
            generations = await self._started(request, body.num_choices, cleanup)
            texts = [
                ChoiceText(body.stop_sequences, output_options=body.output_options)
                for _ in generations
            ]
            async for index, event in _events(generations):
                delta = texts[index].push(event)
                yield Piece(
                    text=delta.text,
                    index=index,
                    token_ids=(event.token.id,),
                    logprobs=(event.token.logprob,),
                    finish_reason=delta.finish_reason,
                )

    async def chat(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        with _typed():
            request = self._read(body, ChatCompletionRequest)
            async with self._started_chat(request) as run:
                answer, _ = await chat_answer(run, request)
                return cast("Mapping[str, Any]", answer)

    async def chat_stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
        with _typed():
            request = self._read(body, ChatCompletionRequest)
            async with self._started_chat(request) as run:
                renderer = chat_renderer(self._services, request, run.chat.names)
                texts = [reader(run.chat, index) for index in range(len(run.generations))]
                async for index, event in _events(run.generations):
                    for chunk in renderer.chunks(index, texts[index].push(event)):
                        yield cast("Mapping[str, Any]", chunk)

    async def embed(self, body: Mapping[str, Any]) -> list[list[float]]:
        with _typed():
            request = self._read(body, EmbeddingsRequest)
            check_task(Task.EMBED, self._services.limits)
            source = PoolingInput(request.input, "input", self._adapter(request.model))
            specials = request.add_special_tokens is not False
            run = embedding_run(
                self._services, request, source, lambda form: form.embedding, specials=specials
            )
            return (await run.finish()).results

    async def score(self, body: Mapping[str, Any]) -> list[float]:
        with _typed():
            request = self._read(body, ScoreRequest)
            check_task(Task.SCORE, self._services.limits)
            adapter = self._adapter(request.model)
            run = await score_run(self._services, request, request.pairs, adapter=adapter)
            return [sigmoid(raw) for raw in (await run.finish()).results]

    async def close(self) -> None:
        await self._deployment.close()

    def _started_chat(self, request: ChatCompletionRequest) -> AbstractAsyncContextManager[ChatRun]:
        """Start a chat; raises RouterError."""
        return run_chat(
            self._services,
            request.chat(self._services.limits),
            adapter=self._adapter(request.model),
        )

    def _read(self, given: Mapping[str, Any], model: type[Model]) -> Model:
        """Check a request as the server's routes do, and warn of names that have no effect; raises RouterError."""
        body, ignored = checked(self._services, given, model)
        if ignored:
            warnings.warn(f"without effect: {', '.join(ignored)}", stacklevel=2)
        return body

    def _adapter(self, model: str | None) -> AdapterReference | None:
        """The adapter that the name means; None for the base model. Raises RouterError."""
        resolver = self._services.adapters
        if model and resolver is not None and resolver.is_adapter(model):
            return AdapterReference(name=check_name(model))
        return None

    async def _started(
        self, request: GenerationRequest, count: int, cleanup: ExitStack
    ) -> Sequence[Generation]:
        """Queue the samples, which close with `cleanup`; raises RouterError."""
        generations = await self._services.infer.start_samples(request, count)
        for generation in generations:
            cleanup.callback(generation.close)
        return generations


def _check(body: CompletionRequest) -> None:
    """Refuse what pieces have no place for; raises ValidationError."""
    for name in WITHOUT_PLACE:
        given = getattr(body, name)
        if given is not None and given is not False:
            raise ValidationError(f"`{name}` is not supported without a server")


class _Sink:
    """Puts the tokens of one generation, with its number, in a queue that several share."""

    def __init__(
        self, index: int, queue: asyncio.Queue[tuple[int, TokenEvent | Exception]]
    ) -> None:
        self._index = index
        self._queue = queue

    def token(self, item: TokenEvent) -> None:
        self._queue.put_nowait((self._index, item))

    def fail(self, error: Exception) -> None:
        self._queue.put_nowait((self._index, error))


async def _events(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, TokenEvent]]:
    """The tokens of all generations as they come; raises RouterError."""
    queue: asyncio.Queue[tuple[int, TokenEvent | Exception]] = asyncio.Queue()
    for index, generation in enumerate(generations):
        generation.connect(_Sink(index, queue))
    num_open = len(generations)
    while num_open:
        index, item = await queue.get()
        if isinstance(item, Exception):
            raise item
        yield index, item
        num_open -= item.finished is not None


@contextmanager
def _typed() -> Iterator[None]:
    """Raise this package's errors in place of the router's."""
    try:
        yield
    except RouterError as error:
        raise RequestError(error.status, error.error_type, str(error)) from error
