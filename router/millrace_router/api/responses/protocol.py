"""Types of OpenAI's responses."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypeAliasType, TypedDict

from millrace_router.api.chat.choice import CachedTokensJson, ChatCompletionLogprobJson

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponseOutputTextJson(TypedDict):
    """A part of a message; every message has one."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatCompletionLogprobJson]


class ResponseMessageJson(TypedDict):
    """The assistant's message."""

    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[ResponseOutputTextJson]


class ResponseFunctionCallJson(TypedDict):
    """A call of a function; the arguments are the text of a JSON object."""

    type: Literal["function_call"]
    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    """Of tools that have one."""
    arguments: str


class ResponseCustomCallJson(TypedDict):
    """A call of a `custom` tool; the input is any text."""

    type: Literal["custom_tool_call"]
    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    input: str


class ResponseSummaryTextJson(TypedDict):
    """A thought."""

    type: Literal["summary_text"]
    text: str


class ResponseReasoningItemJson(TypedDict):
    """The assistant's thought, which stands whole in the place of its summary."""

    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: list[ResponseSummaryTextJson]


ResponseItemJson = TypeAliasType(
    "ResponseItemJson",
    ResponseReasoningItemJson
    | ResponseMessageJson
    | ResponseFunctionCallJson
    | ResponseCustomCallJson,
)


class InputTokensDetailsJson(CachedTokensJson):
    """Details of a prompt's tokens."""

    cache_write_tokens: int


class OutputTokensDetailsJson(TypedDict):
    """Details of an answer's tokens."""

    reasoning_tokens: int


class ResponseUsageJson(TypedDict):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetailsJson
    output_tokens: int
    output_tokens_details: OutputTokensDetailsJson
    total_tokens: int


class ResponseErrorJson(TypedDict):
    """The failure of a response."""

    code: str
    message: str


class ResponseIncompleteJson(TypedDict):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseFunctionToolJson(TypedDict):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool


class ResponseCustomToolJson(TypedDict):
    """A tool whose input is a text."""

    type: Literal["custom"]
    name: str
    description: str | None
    format: dict[str, Any]


class ResponseNamespaceJson(TypedDict):
    """Tools under a common name."""

    type: Literal["namespace"]
    name: str
    description: str | None
    tools: list[ResponseFunctionToolJson | ResponseCustomToolJson]


ResponseToolJson = TypeAliasType(
    "ResponseToolJson", ResponseFunctionToolJson | ResponseCustomToolJson | ResponseNamespaceJson
)


class ResponseTextJson(TypedDict):
    """The format of the text."""

    format: dict[str, Any]


class ResponseReasoningJson(TypedDict):
    """Settings of reasoning, as the request has them; with null, the chat template decides."""

    effort: str | None
    summary: str | None


class ResponseJson(TypedDict):
    """Answer of `/v1/responses`, also in the first and last events of a stream."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    completed_at: int | None
    background: bool
    error: ResponseErrorJson | None
    incomplete_details: ResponseIncompleteJson | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    model: str
    output: list[ResponseItemJson]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoningJson
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: ResponseTextJson
    tool_choice: str | dict[str, Any]
    tools: list[ResponseToolJson]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsageJson | None
    user: str | None
    metadata: dict[str, str]


class InputTokensJson(TypedDict):
    """Answer of `/v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponseJson(TypedDict):
    """Answer to the deletion of a response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemsJson(TypedDict):
    """Items of a stored response's input, as clients sent them, or as responses before it have them."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


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
