"""The interface between `AsyncLLM` and the engine or server that answers it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from millrace.llm.outputs import Piece, Prompt
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
