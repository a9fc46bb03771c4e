"""Types of the events of a streamed response."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypeAliasType, TypedDict

from millrace_router.api.openai.protocol import ChatCompletionLogprobJson
from millrace_router.api.responses.protocol import (
    ResponseItemJson,
    ResponseJson,
    ResponseOutputTextJson,
    ResponseSummaryTextJson,
)


class _EventJson(TypedDict):
    """Fields of every event."""

    sequence_number: int
    """From 0, without gaps."""


class ResponseStateJson(_EventJson):
    """The whole response: in the first two events and in the last."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseJson


class OutputItemEventJson(_EventJson):
    """An item begins, or ends."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: ResponseItemJson


class ContentPartEventJson(_EventJson):
    """The text of a message begins, or ends."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int
    part: ResponseOutputTextJson


class OutputTextDeltaJson(_EventJson):
    """More text."""

    type: Literal["response.output_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[ChatCompletionLogprobJson]


class OutputTextDoneJson(_EventJson):
    """All of a message's text."""

    type: Literal["response.output_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[ChatCompletionLogprobJson]


class SummaryPartEventJson(_EventJson):
    """A thought begins, or ends."""

    type: Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
    item_id: str
    output_index: int
    summary_index: int
    part: ResponseSummaryTextJson


class SummaryTextDeltaJson(_EventJson):
    """More thought."""

    type: Literal["response.reasoning_summary_text.delta"]
    item_id: str
    output_index: int
    summary_index: int
    delta: str


class SummaryTextDoneJson(_EventJson):
    """All of a thought."""

    type: Literal["response.reasoning_summary_text.done"]
    item_id: str
    output_index: int
    summary_index: int
    text: str


class ArgumentsDeltaJson(_EventJson):
    """More of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneJson(_EventJson):
    """All of a call's arguments."""

    type: Literal["response.function_call_arguments.done"]
    item_id: str
    output_index: int
    name: str
    arguments: str


class CustomInputDeltaJson(_EventJson):
    """More of the input of a `custom` tool."""

    type: Literal["response.custom_tool_call_input.delta"]
    item_id: str
    output_index: int
    delta: str


class CustomInputDoneJson(_EventJson):
    """All of the input of a `custom` tool."""

    type: Literal["response.custom_tool_call_input.done"]
    item_id: str
    output_index: int
    input: str


class ResponseErrorEventJson(_EventJson):
    """A failure; `response.failed` follows."""

    type: Literal["error"]
    code: str
    message: str
    param: None


ResponseEventJson = TypeAliasType(
    "ResponseEventJson",
    ResponseStateJson
    | OutputItemEventJson
    | ContentPartEventJson
    | OutputTextDeltaJson
    | OutputTextDoneJson
    | SummaryPartEventJson
    | SummaryTextDeltaJson
    | SummaryTextDoneJson
    | ArgumentsDeltaJson
    | ArgumentsDoneJson
    | CustomInputDeltaJson
    | CustomInputDoneJson
    | ResponseErrorEventJson,
)
