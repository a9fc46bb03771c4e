"""A model for programs with an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Self, TypeVar

from millrace.http.client import is_url
from millrace.llm.backend import Backend
from millrace.llm.outputs import (
    ChatOutput,
    ChatPiece,
    CompletionOutput,
    Piece,
    Prompt,
    RequestOutput,
    chat_pieces,
)
from millrace.llm.params import SamplingParams

Message = Mapping[str, Any]
Item = TypeVar("Item")
Result = TypeVar("Result")
Prompts = str | Sequence[str | Sequence[int]]
DEFAULT_PARAMS = SamplingParams()


class AsyncLLM:
    """A model of this process, or a running server by its URL; use it with `async with`.

    Methods raise RequestError for a request that is refused or fails, and ConnectionFailed for a server that is gone.
    """

    def __init__(
        self, model: str | None = None, *, api_key: str | None = None, **flags: object
    ) -> None:
        """`model` is a folder, a name on the hub, a GGUF file or a URL; the demo model when absent.

        `flags` are the launcher's, such as `max_total_tokens=4096`. `api_key` is that of the server at a URL.
        """
        if model is not None and is_url(model) and flags:
            raise TypeError(f"a server at a URL takes no flags, but got {', '.join(flags)}")
        self._model = model
        self._api_key = api_key
        self._flags = flags
        self._backend: Backend | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Load the model, or connect. Raises StartError, ConnectionFailed or RequestError."""
        self._backend = await _open(self._model, self._api_key, self._flags)

    async def close(self) -> None:
        """End running requests and every process of the model. Idempotent."""
        backend, self._backend = self._backend, None
        if backend is not None:
            await backend.close()

    async def generate(
        self, prompts: Prompts, params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Answer one text, or several texts or lists of token ids, in their order."""
        found = params or DEFAULT_PARAMS

        async def answer(prompt: Prompt) -> RequestOutput:
            pieces: dict[int, list[Piece]] = {}
            async with aclosing(self._opened.complete(prompt, found)) as stream:
                async for piece in stream:
                    pieces.setdefault(piece.index, []).append(piece)
            outputs = tuple(CompletionOutput.of(pieces[index]) for index in sorted(pieces))
            return RequestOutput(prompt=prompt, outputs=outputs)

        return await self._all(answer, _prompts_of(prompts), found.n)

    async def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Answer one prompt, a piece at a time; closing the iterator ends the request."""
        one = prompt if isinstance(prompt, str) else tuple(prompt)
        async with aclosing(self._opened.complete(one, params or DEFAULT_PARAMS)) as pieces:
            async for piece in pieces:
                yield piece

    async def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **fields: object
    ) -> ChatOutput:
        """Answer a chat; `fields` are further ones of OpenAI's body, such as `tools`."""
        return ChatOutput(answer=await self._opened.chat(_chat_body(messages, params, fields)))

    async def chats(
        self,
        conversations: Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        **fields: object,
    ) -> list[ChatOutput]:
        """Answer several chats, in their order."""

        async def answer(messages: Sequence[Message]) -> ChatOutput:
            return await self.chat(messages, params, **fields)

        return await self._all(answer, conversations, (params or DEFAULT_PARAMS).n)

    async def chat_stream(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **fields: object
    ) -> AsyncGenerator[ChatPiece, None]:
        """Answer a chat, a piece at a time; closing the iterator ends the request."""
        body = _chat_body(messages, params, fields)
        async with aclosing(self._opened.chat_stream(body)) as chunks:
            async for chunk in chunks:
                for piece in chat_pieces(chunk):
                    yield piece

    @property
    def _opened(self) -> Backend:
        if self._backend is None:
            raise RuntimeError("the model is not loaded, or closed")
        return self._backend

    async def _all(
        self, answer: Callable[[Item], Awaitable[Result]], items: Sequence[Item], num_samples: int
    ) -> list[Result]:
        """Answer all items, as many at a time as the backend takes; the first failure ends the others."""
        free = asyncio.Semaphore(max(1, self._opened.max_requests // max(1, num_samples)))

        async def bounded(item: Item) -> Result:
            async with free:
                return await answer(item)

        tasks = [asyncio.ensure_future(bounded(item)) for item in items]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _open(model: str | None, api_key: str | None, flags: Mapping[str, object]) -> Backend:
    """Only what is used is imported: a client of a URL needs neither router nor launcher."""
    if model is not None and is_url(model):
        from millrace.llm.remote import Remote  # noqa: PLC0415

        return await Remote.open(model, api_key)
    from millrace.llm.deployment import Deployment  # noqa: PLC0415
    from millrace.llm.local import Local  # noqa: PLC0415

    return Local(await Deployment.start(model, flags))


def _prompts_of(prompts: Prompts) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    return [one if isinstance(one, str) else tuple(one) for one in prompts]


def _chat_body(
    messages: Sequence[Message], params: SamplingParams | None, fields: Mapping[str, object]
) -> dict[str, Any]:
    return {**(params or DEFAULT_PARAMS).body(), **fields, "messages": list(messages)}
