"""Anthropic's request for a message as strict models; features of Anthropic's servers alone are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from millrace_router.api.fields import UINT32_MAX, Float32, Int32, Items, Place, RequestModel


def _as_blocks(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _type_of(block: object) -> object:
    return block.get("type") if isinstance(block, dict) else getattr(block, "type", None)


class TextBlock(RequestModel):
    """A piece of text."""

    type: Literal["text"]
    text: str


Text = Annotated[
    Items[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])
]
"""A string, or blocks of text."""


class ToolUseBlock(RequestModel):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(RequestModel):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Text | None = None
    is_error: bool | None = None


class ThinkingBlock(RequestModel):
    """The assistant's thought, for templates that ask for it."""

    type: Literal["thinking"]
    thinking: str = ""
    signature: str | None = None
    """Not checked."""


class RedactedThinkingBlock(RequestModel):
    """A thought that Anthropic's servers hid, and that templates do not get."""

    type: Literal["redacted_thinking"]


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")],
    Discriminator(
        _type_of,
        custom_error_type="content_block",
        custom_error_message="must be a block of type 'text', 'tool_use', 'tool_result' or "
        "'thinking': images, documents and all others are not supported",
    ),
]
Content = Annotated[
    Items[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])
]
"""A string, or blocks."""
ROLES_OF_BLOCKS = {"tool_use": "assistant", "tool_result": "user"}


class MessagesTurn(RequestModel):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content

    @model_validator(mode="after")
    def _holds_its_own(self) -> MessagesTurn:
        for block in self.content:
            if ROLES_OF_BLOCKS.get(block.type, self.role) != self.role:
                raise ValueError(
                    f"a turn of role '{self.role}' has no block of type '{block.type}'"
                )
        return self


class MessagesTool(RequestModel):
    """A tool of the client."""

    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    """Tools that Anthropic's servers run have other types."""
    strict: bool | None = None


class MessagesToolChoice(RequestModel):
    """Whether the model calls tools, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Name of the tool to call if `type` is `tool`."""
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_its_tool(self) -> MessagesToolChoice:
        if self.type == "tool" and not self.name:
            raise ValueError("a choice of type 'tool' needs a `name`")
        return self


class ThinkingConfig(RequestModel):
    """Whether the model thinks before it answers; templates get it as `enable_thinking` and `thinking`.

    With `adaptive`, as without all this, the template decides.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(default=None, ge=1, le=UINT32_MAX)
    """Tokens after which the thought is closed."""
    display: Literal["summarized", "omitted"] | None = None
    """Whether the answer has the thought; it has by default."""


class MessagesOutputFormat(RequestModel):
    """A schema that the text has to match."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class MessagesOutput(RequestModel):
    """The form of the answer."""

    format: MessagesOutputFormat | None = None
    effort: str | None = None
    """How much the model is to think; templates get it as `reasoning_effort`."""


class CountTokensRequest(RequestModel):
    """Body of `/v1/messages/count_tokens`: the parts of the prompt; null means absent."""

    place = Place.MESSAGE

    model: str | None = None
    messages: Items[MessagesTurn] = Field(min_length=1)
    system: Text | None = None
    tools: Items[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: MessagesOutput | None = None


class MessagesRequest(CountTokensRequest):
    """Body of `/v1/messages`."""

    max_tokens: int = Field(ge=1, le=UINT32_MAX)
    metadata: dict[str, Any] | None = None
    """Ignored."""
    stop_sequences: Items[str] | None = None
    stream: bool | None = None
    temperature: Float32 | None = None
    top_p: Float32 | None = None
    """1 is no restriction."""
    top_k: Int32 | None = None
    """0 is no restriction."""
