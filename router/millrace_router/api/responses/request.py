"""OpenAI's request for a response as strict models, with the items of its input."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BeforeValidator, Discriminator, Field, Tag

from millrace_router.api.body.fields import (
    FieldScope,
    Items,
    Messages,
    NullIs,
    RequestModel,
    Tools,
    UInt32,
)
from millrace_router.api.body.grammars import (
    FormOfText,
    JsonGrammar,
    LarkGrammar,
    RegexGrammar,
    TextFormat,
    raw_schema,
)
from millrace_router.api.body.messages import ContentPart, foreign_in
from millrace_router.api.body.sampling import SamplingFields
from millrace_router.api.responses.tools import (
    LeftOutTool,
    OfferedTool,
    ResponsesTool,
    left_out,
    offered,
)
from millrace_router.errors import ValidationError
from millrace_router.request.grammar import RawGrammar

LEFT_OUT = frozenset(
    (
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
        *("tool_search_call", "tool_search_output", "mcp_list_tools", "mcp_approval_request"),
        *("mcp_approval_response", "program", "program_output"),
    )
)
"""Types of `LeftOutItem`."""
LOGPROBS = "message.output_text.logprobs"
"""The name in `include` that requests log probabilities."""


class MessageItem(RequestModel):
    """One turn of the conversation."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[str | Items[ContentPart], NullIs(str)]
    """Null is an empty turn."""


class FunctionCallItem(RequestModel):
    """A call that the assistant made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    """Of tools that have one."""
    arguments: str | dict[str, Any] | None = None
    """The text of a JSON object; clients may keep the object itself, or null in place of no arguments."""


class CustomToolCallItem(RequestModel):
    """A call of a `custom` tool."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: Annotated[str, NullIs(str)]
    """Any text."""


class CallOutputItem(RequestModel):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Annotated[str | Items[ContentPart], NullIs(str)]
    """Null is an empty result."""


class ClientCallItem(RequestModel):
    """A call of a tool that OpenAI defines and clients run; the template gets it as a call of a function."""

    type: Literal["local_shell_call", "shell_call", "apply_patch_call"]
    call_id: str
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    """In place of `action`, for patches."""

    @property
    def name(self) -> str:
        return self.type.removesuffix("_call")

    @property
    def arguments(self) -> str:
        """The text of a JSON object."""
        return orjson.dumps(self.action or self.operation or {}).decode()


class ClientCallOutputItem(RequestModel):
    """The result of such a call."""

    type: Literal["local_shell_call_output", "shell_call_output", "apply_patch_call_output"]
    call_id: str | None = None
    id: str | None = None
    """Of the call, where there is no `call_id`."""
    output: Any = None
    status: str | None = None

    @property
    def text(self) -> str:
        """Return the result as text: JSON for an object or a list, the status if the result is absent."""
        if self.output is None:
            return self.status or ""
        return self.output if isinstance(self.output, str) else orjson.dumps(self.output).decode()


class McpCallItem(RequestModel):
    """A call of a tool on an MCP server, with its result."""

    type: Literal["mcp_call"]
    id: str
    name: str
    arguments: Annotated[str, NullIs(str)]
    output: str | None = None
    error: Any = None

    @property
    def text(self) -> str:
        if self.output is None and self.error is not None:
            return self.error if isinstance(self.error, str) else orjson.dumps(self.error).decode()
        return self.output or ""


class ReasoningPart(RequestModel):
    """A part of a thought, or of its summary."""

    type: str
    text: Annotated[str, NullIs(str)]


class ReasoningItem(RequestModel):
    """The assistant's thought, for templates that use it."""

    type: Literal["reasoning"]
    summary: Items[ReasoningPart] | None = None
    content: Items[ReasoningPart] | None = None
    encrypted_content: str | None = None
    """Only OpenAI can read it."""

    @property
    def text(self) -> str:
        """The thought itself if it is there, else its summary."""
        return "\n".join(part.text for part in self.content or self.summary or ())


class AdditionalToolsItem(RequestModel):
    """Tools that the model may call in addition to the request's `tools`."""

    type: Literal["additional_tools"]
    role: str | None = None
    tools: Tools[ResponsesTool]


class ItemReference(RequestModel):
    """A stored item; the store puts the item in its place, so that one which is left is unknown."""

    type: Literal["item_reference"] | None = None
    id: str


class LeftOutItem(RequestModel):
    """What OpenAI's own tools left behind, without a text for the prompt."""

    is_open: ClassVar[bool] = True
    type: str


class ForeignItem(RequestModel):
    """An item that is unknown, or that the answer would depend on and that cannot be read.

    At the end it is refused; before that a note stands for it, since it would end the conversation.
    """

    is_open: ClassVar[bool] = True
    type: str


def _kind_of(item: object) -> str:
    """Return the tag of an item's model: its `type`, which two kinds may leave out."""
    if not isinstance(item, dict):
        return _TAGS.get(type(item), "message")
    item_type = item.get("type")
    if item_type is None:
        return "item_reference" if "id" in item and "role" not in item else "message"
    if not isinstance(item_type, str):
        return "foreign"
    return "left_out" if item_type in LEFT_OUT else _BY_TYPE.get(item_type, "foreign")


_TAGS: dict[type, str] = {
    MessageItem: "message",
    FunctionCallItem: "function_call",
    CustomToolCallItem: "custom_tool_call",
    CallOutputItem: "output",
    ClientCallItem: "client_call",
    ClientCallOutputItem: "client_output",
    McpCallItem: "mcp_call",
    ReasoningItem: "reasoning",
    AdditionalToolsItem: "additional_tools",
    ItemReference: "item_reference",
    LeftOutItem: "left_out",
    ForeignItem: "foreign",
}
_BY_TYPE = {
    **{tag: tag for tag in _TAGS.values()},
    **dict.fromkeys(("function_call_output", "custom_tool_call_output"), "output"),
    **dict.fromkeys(("local_shell_call", "shell_call", "apply_patch_call"), "client_call"),
    **dict.fromkeys(
        ("local_shell_call_output", "shell_call_output", "apply_patch_call_output"), "client_output"
    ),
}
InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("output")]
    | Annotated[ClientCallItem, Tag("client_call")]
    | Annotated[ClientCallOutputItem, Tag("client_output")]
    | Annotated[McpCallItem, Tag("mcp_call")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[AdditionalToolsItem, Tag("additional_tools")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[LeftOutItem, Tag("left_out")]
    | Annotated[ForeignItem, Tag("foreign")],
    Discriminator(_kind_of),
]


class ResponsesNamedTool(RequestModel):
    """A tool by its name."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class ResponsesAllowedTools(RequestModel):
    """The tools that the model may call in this turn."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Items[ResponsesNamedTool | LeftOutTool] = Field(min_length=1)
    """Those that are left out may not be called in any case."""


class SchemaTextFormat(FormOfText):
    """JSON as a schema describes it; the generated text is valid with and without `strict`."""

    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Any = Field(alias="schema", default=None)
    """The schema; None for any object."""
    strict: bool | None = None

    def raw(self) -> RawGrammar:
        return raw_schema(self.schema_)


class ResponsesText(FormOfText):
    """The form of the text."""

    format: SchemaTextFormat | TextFormat | JsonGrammar | RegexGrammar | LarkGrammar | None = Field(
        discriminator="type", default=None
    )
    verbosity: str | None = None
    """Ignored: the model does not get it."""


class ResponsesReasoning(RequestModel):
    """How much the model is to think."""

    effort: str | None = None
    """Templates get it as `reasoning_effort`."""
    summary: str | None = None
    """Repeated in the answer, which has the whole thought in any case."""


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesRequest(SamplingFields):
    """Body of `/v1/responses`; null means absent."""

    scope = FieldScope.RESPONSE

    model: str | None = None
    """The model by one of its names, or a LoRA adapter. Range: any name. Default: the served model."""
    input: Annotated[
        Messages[InputItem],
        BeforeValidator(_as_items, json_schema_input_type=str | list[InputItem]),
    ]
    """Items; a text is one message of the user."""
    instructions: str | None = None
    """The system message before all others."""
    max_output_tokens: UInt32 | None = None
    """Most tokens of the answer. Range: 1 to what the context leaves, or to `--max-new-tokens-limit`. Default:
    `--default-max-new-tokens`, otherwise the model's own, otherwise what the context leaves.
    """
    top_logprobs: UInt32 | None = None
    include: Items[str] | None = None
    text: ResponsesText | None = None
    reasoning: ResponsesReasoning | None = None
    thinking_token_budget: UInt32 | None = None
    """Not in OpenAI's: tokens after which the thought is closed."""
    tools: Tools[ResponsesTool] | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | ResponsesNamedTool | ResponsesAllowedTools | None
    ) = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    """Whether the answer comes in pieces, as events. Range: true or false. Default: false."""
    metadata: dict[str, str] | None = None
    """Repeated in the answer, like the three fields below."""
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    previous_response_id: str | None = None
    """Repeated; the store has put the conversation in front of `input`."""
    store: bool | None = None
    """False keeps the response out of the store, which exists only with `--responses-store`."""
    conversation: str | dict[str, Any] | None = None
    """Refused, like the two fields below: OpenAI's servers store what they refer to."""
    prompt: dict[str, Any] | None = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Not in OpenAI's: further variables for the template."""

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has the log probabilities of its text."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def all_tools(self) -> list[ResponsesTool]:
        """The tools, those in items of the input among them."""
        added = [item.tools for item in self.input if isinstance(item, AdditionalToolsItem)]
        return list(chain(self.tools or (), *added))

    @property
    def offered(self) -> list[OfferedTool]:
        """The tools that the model may call."""
        return list(offered(self.all_tools))

    def check(self) -> None:
        """Refuse what is not supported and would change the answer; raises ValidationError."""
        for name in ("conversation", "prompt"):
            if getattr(self, name) is not None:
                raise ValidationError(
                    f"`{name}` is not supported: send everything as `input`, or refer to a stored response "
                    "by `previous_response_id`"
                )
        if self.background:
            raise ValidationError(
                "`background` is not supported: read the answer, or a stream of its events"
            )
        last = self.input[-1] if self.input else None
        if isinstance(last, ForeignItem):
            raise ValidationError(
                f"`input` ends with an item of type `{last.type[:40]}`, which is not supported"
            )

    def left_out(self) -> Iterator[str]:
        yield from left_out(self.all_tools)
        if self.text is not None and self.text.verbosity not in {None, "medium"}:
            yield "text.verbosity"
        for item in self.input:
            if isinstance(item, LeftOutItem | ForeignItem):
                yield f"input.{item.type}"
            elif isinstance(item, CallOutputItem):
                yield from (f"input.output.{type_}" for type_ in foreign_in(item.output))
            elif isinstance(item, MessageItem):
                yield from (f"input.{type_}" for type_ in foreign_in(item.content))
            elif isinstance(item, ReasoningItem) and item.encrypted_content and not item.text:
                yield "input.reasoning"
