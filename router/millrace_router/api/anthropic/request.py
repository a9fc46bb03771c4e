"""Anthropic's request for a message as strict models; features of Anthropic's servers alone are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from millrace_router.api.anthropic.blocks import Content, Text, left_out
from millrace_router.api.body.fields import UINT32_MAX, Float32, Int32, Items, Place, RequestModel

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
    strict: bool | None = None


class LeftOutMessagesTool(RequestModel):
    """A tool that Anthropic's servers would run, or that its models know without a definition."""

    is_open: ClassVar[bool] = True
    type: str


def _kind_of_tool(tool: object) -> str:
    if not isinstance(tool, dict):
        return "left_out" if isinstance(tool, LeftOutMessagesTool) else "custom"
    return "custom" if tool.get("type") in {None, "custom"} else "left_out"


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

    With `adaptive` and `between_tools`, as without all this, the template decides.
    """

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
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
    tools: (
        Items[
            Annotated[
                Annotated[MessagesTool, Tag("custom")]
                | Annotated[LeftOutMessagesTool, Tag("left_out")],
                Discriminator(_kind_of_tool),
            ]
        ]
        | None
    ) = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: MessagesOutput | None = None
    thread: dict[str, Any] | None = None
    """Refused, in words that Anthropic's clients know: they send the whole conversation then."""

    @property
    def offered(self) -> list[MessagesTool]:
        """The tools that the model may call."""
        return [tool for tool in self.tools or () if isinstance(tool, MessagesTool)]

    def left_out(self) -> Iterator[str]:
        """Yield names of the parts that the prompt does not have."""
        for tool in self.tools or ():
            if isinstance(tool, LeftOutMessagesTool):
                yield f"tools.{tool.type}"
        for turn in self.messages:
            yield from (f"messages.{type_}" for type_ in left_out(turn.content))


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
