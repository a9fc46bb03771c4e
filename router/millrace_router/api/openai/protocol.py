"""Shapes of OpenAI's answers, with the key order and the nulls of TGI's."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypeAliasType, TypedDict

from millrace_router.text.tokenizer import TokenSpan


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
    logprob: float
    bytes: list[int]
    """Of the text it adds: UTF-8, cut anywhere."""


class ChatCompletionLogprobJson(ChatCompletionTopLogprobJson):
    """A generated token, and the likeliest in its place."""

    top_logprobs: list[ChatCompletionTopLogprobJson]


class ChatCompletionLogprobsJson(TypedDict):
    """Tokens of a choice or of a chunk."""

    content: list[ChatCompletionLogprobJson]


class CalledFunctionJson(TypedDict):
    """Which function is called, and with what: the text of a JSON object."""

    description: None
    """TGI has it there."""
    name: str
    arguments: str


class ToolCallJson(TypedDict):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunctionJson


class TextMessageJson(TypedDict):
    """What the assistant said."""

    role: str
    content: str


class ToolCallMessageJson(TypedDict):
    """What the assistant calls, and said before, if it said anything."""

    role: str
    content: str | None
    tool_calls: list[ToolCallJson]


OutputMessageJson = TypeAliasType("OutputMessageJson", TextMessageJson | ToolCallMessageJson)
"""A turn of the assistant."""


class ChatCompletionCompleteJson(TypedDict):
    """A choice in one piece."""

    index: int
    message: OutputMessageJson
    logprobs: ChatCompletionLogprobsJson | None
    finish_reason: str | None


class ChatCompletionJson(HeadJson):
    """Answer of `/v1/chat/completions`."""

    choices: list[ChatCompletionCompleteJson]
    usage: UsageJson


class FunctionJson(TypedDict):
    """A piece of a call: the name comes with the first."""

    name: NotRequired[str]
    arguments: str


class DeltaToolCallJson(TypedDict):
    """A piece of the call `index`; its first one says which it is."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionJson


class TextDeltaJson(TypedDict):
    """A piece of what the assistant says; the first of a choice has its role."""

    role: NotRequired[str]
    content: NotRequired[str]


class ToolCallDeltaJson(TypedDict):
    """Pieces of calls."""

    role: NotRequired[str]
    """TGI has it here, too."""
    tool_calls: list[DeltaToolCallJson]


ChatCompletionDeltaJson = TypeAliasType(
    "ChatCompletionDeltaJson", TextDeltaJson | ToolCallDeltaJson
)
"""What a chunk adds to a choice."""


class ChatCompletionChoiceJson(TypedDict):
    """A piece of a choice."""

    index: int
    delta: ChatCompletionDeltaJson
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
