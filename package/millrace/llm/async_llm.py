"""A model for programs with an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol, Self, TypeVar

from millrace.http.client import is_url
from millrace.images import with_image_urls
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


class Backend(Protocol):
    """A model that answers. A stream that is closed ends its request.

    Methods raise RequestError or ConnectionFailed.
    """

    @property
    def max_requests(self) -> int:
        """Requests that may be in flight."""

    def complete(self, prompt: Prompt, params: SamplingParams) -> AsyncGenerator[Piece, None]:
        """Stream the answers to one prompt, interleaved as they come."""

    async def chat(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer to the body of a chat, as OpenAI has it."""

    def chat_stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
        """The chunks of an answer to the body of a chat, as OpenAI has them."""

    async def embed(self, body: Mapping[str, Any]) -> list[list[float]]:
        """The embeddings of the `input` of a body, as OpenAI has it."""

    async def score(self, body: Mapping[str, Any]) -> list[float]:
        """The scores of the pairs of a body, as vLLM has it."""

    async def close(self) -> None:
        """End everything that was started for it."""


class RequestSlots:
    """Gives places in the order in which they are asked for."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = count
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @asynccontextmanager
    async def taken(self, wanted: int) -> AsyncGenerator[None, None]:
        """Hold `wanted` places at once, or all there are if that is less."""
        wanted = max(1, min(wanted, self._count))
        await self._take(wanted)
        try:
            yield
        finally:
            self._give(wanted)

    async def _take(self, wanted: int) -> None:
        if not self._waiting and self._free >= wanted:
            self._free -= wanted
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((future, wanted))
        try:
            await future
        except asyncio.CancelledError:
            # The places may have been given at the same moment, and others may fit where this one waited.
            self._give(0 if future.cancelled() else wanted)
            raise

    def _give(self, count: int) -> None:
        self._free += count
        while self._waiting:
            future, wanted = self._waiting[0]
            if not future.cancelled():
                if wanted > self._free:
                    return
                self._free -= wanted
                future.set_result(None)
            self._waiting.popleft()


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

        `flags` are the launcher's, such as `max_total_tokens=4096`. `api_key` is for the server at a URL.
        """
        if model is not None and is_url(model) and flags:
            raise TypeError(f"a server at a URL takes no flags, but got {', '.join(flags)}")
        self._model = model
        self._api_key = api_key
        self._flags = flags
        self._backend: Backend | None = None
        self._places = RequestSlots(1)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Load the model, or connect. Raises StartError, ConnectionFailed or RequestError."""
        self._backend = await _open(self._model, self._api_key, self._flags)
        self._places = RequestSlots(self._backend.max_requests)

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
            async with (
                self._places.taken(_num_samples(found.body())),
                aclosing(self._opened.complete(prompt, found)) as stream,
            ):
                async for piece in stream:
                    pieces.setdefault(piece.index, []).append(piece)
            outputs = tuple(CompletionOutput.of(pieces[index]) for index in sorted(pieces))
            return RequestOutput(prompt=prompt, outputs=outputs)

        return await _all(answer, _prompts_of(prompts))

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
        """Answer a chat; `fields` are further ones of OpenAI's body, such as `tools`.

        A content's parts may be `{"type": "image", "image": …}` with a path, bytes or an image of Pillow.
        """
        body = _chat_body(messages, params, fields)
        async with self._places.taken(_num_samples(body)):
            return ChatOutput(answer=await self._opened.chat(body))

    async def chats(
        self,
        conversations: Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        **fields: object,
    ) -> list[ChatOutput]:
        """Answer several chats, in their order."""

        async def answer(messages: Sequence[Message]) -> ChatOutput:
            return await self.chat(messages, params, **fields)

        return await _all(answer, conversations)

    async def chat_stream(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **fields: object
    ) -> AsyncGenerator[ChatPiece, None]:
        """Answer a chat, a piece at a time; closing the iterator ends the request."""
        body = _chat_body(messages, params, fields)
        async with aclosing(self._opened.chat_stream(body)) as chunks:
            async for chunk in chunks:
                for piece in chat_pieces(chunk):
                    yield piece

    async def embed(self, texts: Prompts, **fields: object) -> list[list[float]]:
        """Embed one text, or several texts or lists of token ids, in their order.

        `fields` are further ones of `/v1/embeddings`, such as `dimensions`.
        """
        prompts = [one if isinstance(one, str) else list(one) for one in _prompts_of(texts)]
        return await self._opened.embed({**fields, "input": prompts})

    async def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], **fields: object
    ) -> list[float]:
        """Score pairs of texts: one with each of the others, or the first with the first and so on.

        `fields` are further ones of `/v1/score`, such as `instruction`.
        """
        sides = (one if isinstance(one, str) else list(one) for one in (text_1, text_2))
        return await self._opened.score(
            {**fields, **dict(zip(("text_1", "text_2"), sides, strict=True))}
        )

    @property
    def _opened(self) -> Backend:
        if self._backend is None:
            raise RuntimeError("the model is not loaded, or closed")
        return self._backend


async def _all(answer: Callable[[Item], Awaitable[Result]], items: Sequence[Item]) -> list[Result]:
    """Answer all items; the first failure ends the others."""
    tasks = [asyncio.ensure_future(answer(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _num_samples(body: Mapping[str, object]) -> int:
    """Requests that a body stands for."""
    count = body.get("n")
    return count if isinstance(count, int) else 1


async def _open(model: str | None, api_key: str | None, flags: Mapping[str, object]) -> Backend:
    """Only what is used is imported: a client of a URL needs neither router nor launcher."""
    if model is not None and is_url(model):
        from millrace.llm.remote import Remote  # noqa: PLC0415

        return await Remote.open(model, api_key)
    from millrace.llm.deployment import LocalModel  # noqa: PLC0415
    from millrace.llm.local import Local  # noqa: PLC0415

    return Local(await LocalModel.start(model, flags))


def _prompts_of(prompts: Prompts) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    return [one if isinstance(one, str) else tuple(one) for one in prompts]


def _chat_body(
    messages: Sequence[Message], params: SamplingParams | None, fields: Mapping[str, object]
) -> dict[str, Any]:
    return {
        **(params or DEFAULT_PARAMS).body(),
        **fields,
        "messages": with_image_urls(messages),
    }
