"""A model at a URL."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from millrace.http.client import Client
from millrace.llm.outputs import Piece, Prompt
from millrace.llm.params import SamplingParams

CHATS = "/v1/chat/completions"
MAX_REQUESTS = 64


class Remote:
    """A `Backend` over OpenAI's API."""

    max_requests = MAX_REQUESTS

    def __init__(self, client: Client, model: str) -> None:
        self._client = client
        self._model = model

    @classmethod
    async def open(cls, url: str, api_key: str | None) -> Remote:
        """Connect, and ask for the model's name. Raises ConnectionFailed or RequestError."""
        client = Client(url, api_key)
        await client.open()
        try:
            model = await client.first_model()
        except BaseException:
            await client.close()
            raise
        return cls(client, model)

    async def complete(self, prompt: Prompt, params: SamplingParams) -> AsyncGenerator[Piece, None]:
        text = prompt if isinstance(prompt, str) else list(prompt)
        body = {"model": self._model, **params.body(), "prompt": text, "stream": True}
        async with aclosing(self._client.stream("/v1/completions", body)) as events:
            async for event in events:
                for choice in event.get("choices") or ():
                    yield _piece(choice)

    async def chat(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = await self._client.post(CHATS, {"model": self._model, **body})
        return answer

    async def chat_stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
        request = {"model": self._model, **body, "stream": True}
        async with aclosing(self._client.stream(CHATS, request)) as events:
            async for event in events:
                yield event

    async def embed(self, body: Mapping[str, Any]) -> list[list[float]]:
        request = {"model": self._model, "encoding_format": "float", **body}
        return [one["embedding"] for one in await self._data("/v1/embeddings", request)]

    async def score(self, body: Mapping[str, Any]) -> list[float]:
        request = {"model": self._model, **body}
        return [one["score"] for one in await self._data("/v1/score", request)]

    async def _data(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The objects of an answer in the order of the input."""
        answer = await self._client.post(path, body)
        return sorted(answer["data"], key=lambda one: one["index"])

    async def close(self) -> None:
        await self._client.close()


def _piece(choice: Mapping[str, Any]) -> Piece:
    ids = choice.get("token_ids")
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    return Piece(
        text=choice.get("text") or "",
        index=choice.get("index", 0),
        token_ids=None if ids is None else tuple(ids),
        logprobs=None if logprobs is None else tuple(logprobs),
        finish_reason=choice.get("finish_reason"),
    )
