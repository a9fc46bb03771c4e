"""Types of OpenAI's answers, with the key order and the nulls of TGI."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypeAliasType, TypedDict

from millrace_router.api.chat.choice import CachedTokensJson, ChatCompletionLogprobJson
from millrace_router.text.tokenizer import TokenSpan


class ReasoningTokensJson(TypedDict):
    """Details of an answer's tokens."""

    reasoning_tokens: int


class UsageJson(TypedDict):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokensJson
    completion_tokens_details: NotRequired[ReasoningTokensJson]
    """Only models that write thoughts have it."""


class PromptLogprobJson(TypedDict):
    """A token in one place of a prompt, as in vLLM."""

    logprob: float
    rank: int | None
    """From 1; null for a token that is not among the likeliest ones."""
    decoded_token: str


class HeadJson(TypedDict):
    """The first keys of every answer and chunk of one request."""

    object: str
    id: str
    created: int
    model: str
    system_fingerprint: str
    prompt_token_ids: NotRequired[list[int]]
    """Of chats with `return_token_ids`: in the answer, or in the first chunk of each choice."""
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprobJson] | None]]
    """Of chats with `prompt_logprobs`: for each token of the prompt."""


class ChatCompletionLogprobsJson(TypedDict):
    """Tokens of a choice or of a chunk."""

    content: list[ChatCompletionLogprobJson]


class CalledFunctionJson(TypedDict):
    """The name of a called function, and its arguments as the text of a JSON object."""

    description: None
    """Always null; TGI has the key."""
    name: str
    arguments: str


class ToolCallJson(TypedDict):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunctionJson


class ThoughtsJson(TypedDict):
    """The assistant's thought, if there is one."""

    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    """The same text: clients know it under either name."""


class TextMessageJson(ThoughtsJson):
    """The assistant's text."""

    role: str
    content: str


class ToolCallMessageJson(ThoughtsJson):
    """The assistant's calls, and the text before them, if any."""

    role: str
    content: str | None
    tool_calls: list[ToolCallJson]


OutputMessageJson = TypeAliasType("OutputMessageJson", TextMessageJson | ToolCallMessageJson)
"""The message of the assistant."""


class ChatCompletionCompleteJson(TypedDict):
    """A choice in one piece."""

    index: int
    message: OutputMessageJson
    logprobs: ChatCompletionLogprobsJson | None
    finish_reason: str | None
    token_ids: NotRequired[list[int]]
    """With `return_token_ids`."""


class ChatCompletionJson(HeadJson):
    """Answer of `/v1/chat/completions`."""

    choices: list[ChatCompletionCompleteJson]
    usage: UsageJson


class FunctionJson(TypedDict):
    """A part of a call; the first part has the name."""

    name: NotRequired[str]
    arguments: str


class DeltaToolCallJson(TypedDict):
    """A part of the call `index`; the first part has id and type."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionJson


class TextDeltaJson(TypedDict):
    """A part of the assistant's text; the first part of a choice has the role."""

    role: NotRequired[str]
    content: NotRequired[str]


class ToolCallDeltaJson(TypedDict):
    """Parts of calls."""

    role: NotRequired[str]
    """TGI has it in these chunks, too."""
    tool_calls: list[DeltaToolCallJson]


class ThoughtDeltaJson(TypedDict):
    """A part of the assistant's thought, under both of its names."""

    role: NotRequired[str]
    reasoning_content: str
    reasoning: str


class OldFunctionJson(TypedDict):
    """A part of a call for TGI's old clients."""

    name: str | None
    arguments: str


class OldToolCallJson(TypedDict):
    """A part of the call `index` for TGI's old clients."""

    index: int
    id: str
    type: Literal["function"]
    function: OldFunctionJson


class OldDeltaJson(TypedDict):
    """A part of a choice for TGI's old clients: it has all keys, and one call at most."""

    role: str
    content: str | None
    tool_calls: OldToolCallJson | None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]


ChatCompletionDeltaJson = TypeAliasType(
    "ChatCompletionDeltaJson", TextDeltaJson | ToolCallDeltaJson | ThoughtDeltaJson | OldDeltaJson
)
"""The part of a choice that a chunk adds."""


class ChatCompletionChoiceJson(TypedDict):
    """A part of a choice."""

    index: int
    delta: ChatCompletionDeltaJson
    logprobs: ChatCompletionLogprobsJson | None
    finish_reason: str | None
    token_ids: NotRequired[list[int]]
    """With `return_token_ids`."""


class ChatCompletionChunkJson(HeadJson):
    """One event of a chat's stream; in the chunk of the usage `choices` is empty."""

    choices: list[ChatCompletionChoiceJson]
    usage: UsageJson | None


class ModelJson(TypedDict):
    """The served model, or an adapter of it."""

    id: str
    object: str
    created: int
    owned_by: str
    root: NotRequired[str]
    """Only adapters have it, and the field below: the id on the hub, or the name of the folder."""
    parent: NotRequired[str]
    """The served model."""


class ModelInfoJson(TypedDict):
    """Answer of `/v1/models`."""

    object: str
    data: list[ModelJson]


class ChatTokenizeResponseJson(TypedDict):
    """Answer of `/chat_tokenize`."""

    tokenize_response: list[TokenSpan]
    templated_text: str


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
