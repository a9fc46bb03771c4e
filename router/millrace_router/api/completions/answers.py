"""Text completions as plain dictionaries for the JSON writer."""

from __future__ import annotations

from collections.abc import Sequence

from millrace_router.api.completions.logprobs import join
from millrace_router.api.completions.protocol import (
    ChunkJson,
    CompletionCompleteJson,
    CompletionFinalJson,
)
from millrace_router.api.completions.text import CompletionDelta
from millrace_router.api.openai.answers import AnswerHead, usage_json
from millrace_router.api.openai.choice import ChoiceDelta, token_ids
from millrace_router.engine.generation import Usage
from millrace_router.request.dialect import Dialect


def completion_choice(
    index: int, deltas: Sequence[CompletionDelta], prompt_ids: Sequence[int] | None = None
) -> CompletionCompleteJson:
    """Render a choice in one piece; with `prompt_ids` also the ids of all tokens."""
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    choice: CompletionCompleteJson = {
        "index": index,
        "text": "".join(delta.text for delta in deltas),
        "logprobs": join(logprobs) if logprobs else None,
        "finish_reason": deltas[-1].finish_reason,
    }
    if prompt_ids is not None:
        choice["token_ids"] = token_ids(deltas)
        choice["prompt_token_ids"] = list(prompt_ids)
    return choice


class CompletionChunks:
    """Renders the events of a stream.

    Usage comes with each choice's last chunk as in TGI, or for all of them in a chunk of its own if `includes_usage`,
    and with every chunk, as far as its choice has come, if `continuous_usage`.
    """

    def __init__(
        self,
        head: AnswerHead,
        *,
        includes_usage: bool,
        continuous_usage: bool,
        dialect: Dialect,
    ) -> None:
        self.includes_usage = includes_usage
        self.continuous_usage = continuous_usage
        self._head = head
        self._no_reason = "" if dialect.has_tgi_reasons else None

    def text_chunk(self, index: int, text: str) -> ChunkJson:
        """Render a chunk with nothing but text."""
        return self._chunk(index, ChoiceDelta(text, None, 0, None))

    def chunk(
        self,
        index: int,
        delta: CompletionDelta,
        usage: Usage,
        prompt_ids: Sequence[int] | None = None,
    ) -> ChunkJson | CompletionFinalJson:
        """Render the chunk of any delta, with `prompt_ids` also the prompt's; `usage` is that of its choice so far."""
        chunk = self._chunk(index, delta, prompt_ids)
        is_last = delta.finish_reason is not None and not self.includes_usage
        if not (is_last or self.continuous_usage):
            return chunk
        told: CompletionFinalJson = {**chunk, "usage": usage_json(usage)}
        return told

    def usage_chunk(self, usage: Usage) -> CompletionFinalJson:
        """Render the chunk after the last token."""
        return {**self._head.json(), "choices": [], "usage": usage_json(usage)}

    def _chunk(
        self, index: int, delta: CompletionDelta, prompt_ids: Sequence[int] | None = None
    ) -> ChunkJson:
        choice: CompletionCompleteJson = {
            "index": index,
            "text": delta.text,
            "logprobs": delta.logprobs,
            "finish_reason": delta.finish_reason or self._no_reason,
        }
        if delta.token_id is not None:
            choice["token_ids"] = [delta.token_id]
        if prompt_ids is not None:
            choice["prompt_token_ids"] = list(prompt_ids)
        return {**self._head.json(), "choices": [choice]}
