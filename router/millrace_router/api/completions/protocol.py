"""Types of the text completion's answers, with the key order and the nulls of TGI."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict

from millrace_router.api.openai.protocol import HeadJson, PromptLogprobJson, UsageJson


class CompletionLogprobsJson(TypedDict):
    """Columns of equal length, in the shape of OpenAI's first completions."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """null for the first token of a prompt."""
    top_logprobs: list[dict[str, float] | None]
    """For each token, the likeliest tokens in its place, and the token itself."""
    text_offset: list[int]
    """For each token, the position of its first character in the choice's text."""


class CompletionCompleteJson(TypedDict):
    """A choice of a text completion, or a part of one."""

    index: int
    text: str
    logprobs: CompletionLogprobsJson | None
    finish_reason: str | None
    """null until the last part; "" with `--strict-tgi`."""
    token_ids: NotRequired[list[int]]
    """With `return_token_ids`."""
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprobJson] | None]]
    """With `prompt_logprobs`: for each token of the prompt."""
    prompt_token_ids: NotRequired[list[int]]
    """With `return_token_ids`, in the first part of each choice."""


class ChunkJson(HeadJson):
    """One event of a text completion's stream."""

    choices: list[CompletionCompleteJson]


class CompletionFinalJson(ChunkJson):
    """Answer of `/v1/completions`, and the events with the usage, such as the last one of a choice."""

    usage: UsageJson
