"""Types of Anthropic's answers."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class MessagesTextJson(TypedDict):
    """The assistant's text."""

    type: Literal["text"]
    text: str


class MessagesToolUseJson(TypedDict):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessagesThinkingJson(TypedDict):
    """The assistant's thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str
    """A hash of the thought, which clients send back with it; empty until the thought has ended."""


BlockJson = MessagesThinkingJson | MessagesTextJson | MessagesToolUseJson


class MessagesUsageJson(TypedDict):
    """Token counts; `input_tokens` excludes tokens found in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessagesAnswerJson(TypedDict):
    """Answer of `/v1/messages`; at the start of a stream its end is null."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[BlockJson]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsageJson


class CountTokensJson(TypedDict):
    """Answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class MessageStartJson(TypedDict):
    """The first event of a stream."""

    type: Literal["message_start"]
    message: MessagesAnswerJson


class PingJson(TypedDict):
    """An event without content."""

    type: Literal["ping"]


class ContentBlockStartJson(TypedDict):
    """A block begins, empty."""

    type: Literal["content_block_start"]
    index: int
    content_block: BlockJson


class MessagesTextDeltaJson(TypedDict):
    """More text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDeltaJson(TypedDict):
    """More thought."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDeltaJson(TypedDict):
    """The signature, which ends a thought."""

    type: Literal["signature_delta"]
    signature: str


class InputJsonDeltaJson(TypedDict):
    """More of the JSON of a call's arguments."""

    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDeltaJson(TypedDict):
    """A block grows."""

    type: Literal["content_block_delta"]
    index: int
    delta: MessagesTextDeltaJson | ThinkingDeltaJson | SignatureDeltaJson | InputJsonDeltaJson


class ContentBlockStopJson(TypedDict):
    """A block is complete."""

    type: Literal["content_block_stop"]
    index: int


class MessageEndJson(TypedDict):
    """Why a message ended, if it has."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageDeltaJson(TypedDict):
    """The end of a message."""

    type: Literal["message_delta"]
    delta: MessageEndJson
    usage: MessagesUsageJson


class MessageStopJson(TypedDict):
    """The last event of a stream."""

    type: Literal["message_stop"]


MessageEventJson = (
    MessageStartJson
    | PingJson
    | ContentBlockStartJson
    | ContentBlockDeltaJson
    | ContentBlockStopJson
    | MessageDeltaJson
    | MessageStopJson
)


class MessagesErrorJson(TypedDict):
    """Details of a failure."""

    type: str
    message: str
    details: NotRequired[dict[str, Any]]
    """What clients can act on."""


class MessagesErrorResponseJson(TypedDict):
    """A failure, before a stream or in it."""

    type: Literal["error"]
    error: MessagesErrorJson
    request_id: str | None
