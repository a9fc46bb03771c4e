"""Shapes of the text completion's answers, with the key order and the nulls of TGI's."""

from __future__ import annotations

from typing_extensions import TypedDict

from millrace_router.api.openai_json import HeadJson, UsageJson


class CompletionCompleteJson(TypedDict):
    """A choice of a text completion, or a piece of one, whose `finish_reason` is "" until the last."""

    index: int
    text: str
    logprobs: None
    finish_reason: str


class ChunkJson(HeadJson):
    """One event of a text completion's stream."""

    choices: list[CompletionCompleteJson]


class CompletionFinalJson(ChunkJson):
    """Answer of `/v1/completions`, and a stream's last event of a prompt."""

    usage: UsageJson
