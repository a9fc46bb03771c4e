"""Shapes of OpenAI's answers, with the key order and the nulls of TGI's."""

from __future__ import annotations

from typing_extensions import TypedDict

from millrace_router.tokenizer import TokenSpan


class CachedTokensJson(TypedDict):
    """What is told of a prompt's tokens."""

    cached_tokens: int


class UsageJson(TypedDict):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokensJson


class HeadJson(TypedDict):
    """The keys that every answer and chunk of one request begins with."""

    object: str
    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletionTopLogprobJson(TypedDict):
    """A token and its log probability."""

    token: str
    logprob: float | None


class ChatCompletionLogprobJson(ChatCompletionTopLogprobJson):
    """A generated token, and the likeliest in its place."""

    top_logprobs: list[ChatCompletionTopLogprobJson]


class ChatCompletionLogprobsJson(TypedDict):
    """Tokens of a choice or of a chunk."""

    content: list[ChatCompletionLogprobJson]


class TextMessageJson(TypedDict):
    """What the assistant said, or a piece of it."""

    role: str
    content: str


class ChatCompletionCompleteJson(TypedDict):
    """A choice in one piece."""

    index: int
    message: TextMessageJson
    logprobs: ChatCompletionLogprobsJson | None
    finish_reason: str | None


class ChatCompletionJson(HeadJson):
    """Answer of `/v1/chat/completions`."""

    choices: list[ChatCompletionCompleteJson]
    usage: UsageJson


class ChatCompletionChoiceJson(TypedDict):
    """A piece of a choice."""

    index: int
    delta: TextMessageJson
    logprobs: ChatCompletionLogprobsJson | None
    finish_reason: str | None


class ChatCompletionChunkJson(HeadJson):
    """One event of a chat's stream; no choices beside the usage that was asked for."""

    choices: list[ChatCompletionChoiceJson]
    usage: UsageJson | None


class ModelJson(TypedDict):
    """The model that is served."""

    id: str
    object: str
    created: int
    owned_by: str


class ModelInfoJson(TypedDict):
    """Answer of `/v1/models`."""

    object: str
    data: list[ModelJson]


class ChatTokenizeResponseJson(TypedDict):
    """Answer of `/chat_tokenize`."""

    tokenize_response: list[TokenSpan]
    templated_text: str


class StreamFailureJson(TypedDict):
    """What went wrong in the middle of a stream."""

    message: str
    type: str
    http_status_code: int


class StreamErrorJson(TypedDict):
    """The last event but one of a stream that failed."""

    error: StreamFailureJson


class FailureJson(StreamFailureJson):
    """What went wrong, as OpenAI's clients read it."""

    param: None
    code: None


class OpenAIErrorResponseJson(TypedDict):
    """A failure for OpenAI's clients, which print `error.message`, and TGI's, which read `error_type`."""

    error: FailureJson
    error_type: str
