"""A model for programs without an event loop: `AsyncLLM` on its own thread."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from typing import Any, Self, TypeVar

from millrace.llm.async_llm import AsyncLLM, Message, Prompts
from millrace.llm.outputs import ChatOutput, ChatPiece, Piece, RequestOutput
from millrace.llm.params import SamplingParams

Item = TypeVar("Item")
Result = TypeVar("Result")


class LLM:
    """A model of this process, or a running server by its URL; `close` or `with` ends it.

    Several threads may use it. Raises the same errors as `AsyncLLM`, and StartError where the model cannot be loaded.
    """

    def __init__(
        self, model: str | None = None, *, api_key: str | None = None, **flags: object
    ) -> None:
        """Load the model, with the arguments of `AsyncLLM`. Raises StartError."""
        self._llm = AsyncLLM(model, api_key=api_key, **flags)
        self._loop = _Loop()
        self._finalizer = weakref.finalize(self, _close, self._llm, self._loop)
        try:
            self._loop.run(self._llm.start())
        except BaseException:
            self._finalizer()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End running requests, every process of the model, and the thread. Idempotent."""
        self._finalizer()

    def generate(
        self, prompts: Prompts, params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Answer one text, or several texts or lists of token ids, in their order."""
        return self._loop.run(self._llm.generate(prompts, params))

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> Generator[Piece, None, None]:
        """Answer one prompt, a piece at a time; closing the iterator ends the request."""
        return self._loop.iterate(self._llm.stream(prompt, params))

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **fields: object
    ) -> ChatOutput:
        """Answer a chat; `fields` are further ones of OpenAI's body, such as `tools`."""
        return self._loop.run(self._llm.chat(messages, params, **fields))

    def chats(
        self,
        conversations: Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        **fields: object,
    ) -> list[ChatOutput]:
        """Answer several chats, in their order."""
        return self._loop.run(self._llm.chats(conversations, params, **fields))

    def chat_stream(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **fields: object
    ) -> Generator[ChatPiece, None, None]:
        """Answer a chat, a piece at a time; closing the iterator ends the request."""
        return self._loop.iterate(self._llm.chat_stream(messages, params, **fields))

    def embed(self, texts: Prompts, **fields: object) -> list[list[float]]:
        return self._loop.run(self._llm.embed(texts, **fields))

    def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], **fields: object
    ) -> list[float]:
        return self._loop.run(self._llm.score(text_1, text_2, **fields))


class _Loop:
    """An event loop on a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="millrace-llm", daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the thread, and wait; an interrupt of the caller cancels it."""
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the model is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncGenerator[Item, None]) -> Generator[Item, None, None]:
        """The items of an asynchronous generator, which is closed with the iterator."""
        end = object()

        async def following() -> Item | object:
            return await anext(items, end)

        try:
            while (item := self.run(following())) is not end:
                yield item  # type: ignore[misc]
        finally:
            if not self._loop.is_closed():
                self.run(items.aclose())

    @property
    def is_here(self) -> bool:
        """Whether the caller is on the thread."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _close(llm: AsyncLLM, loop: _Loop) -> None:
    if loop.is_here:
        # The garbage collector may run on the loop's own thread, which cannot wait for itself.
        threading.Thread(target=_close, args=(llm, loop)).start()
        return
    try:
        loop.run(llm.close())
    finally:
        loop.stop()
