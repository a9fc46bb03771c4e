"""Shapes of the text completion's answers, with the key order and the nulls of TGI's."""

from __future__ import annotations

from typing_extensions import TypedDict

from millrace_router.api.openai.protocol import HeadJson, UsageJson


class CompletionLogprobsJson(TypedDict):
    """Columns of equal length, in the shape of OpenAI's first completions."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """null for the first token of a prompt."""
    top_logprobs: list[dict[str, float] | None]
    """The likeliest tokens in the place of each, and the token itself."""
    text_offset: list[int]
    """The character of the choice's text where each begins."""


class CompletionCompleteJson(TypedDict):
    """A choice of a text completion, or a piece of one."""

    index: int
    text: str
    logprobs: CompletionLogprobsJson | None
    finish_reason: str | None
    """null until the last piece; "" there with `--strict-tgi`."""


class ChunkJson(HeadJson):
    """One event of a text completion's stream."""

    choices: list[CompletionCompleteJson]


class CompletionFinalJson(ChunkJson):
    """Answer of `/v1/completions`, and an event that tells usage, as a stream's last one of a choice does."""

    usage: UsageJson
