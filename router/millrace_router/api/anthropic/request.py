"""Anthropic's request for a message as strict models; features that only Anthropic's servers have are refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from millrace_router.api.body.fields import (
    UINT32_MAX,
    FieldScope,
    Float32,
    Int32,
    Items,
    RequestModel,
)

LEFT_OUT = frozenset(
    (
        *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result"),
        *("code_execution_tool_result", "bash_code_execution_tool_result"),
        *("text_editor_code_execution_tool_result", "tool_search_tool_result"),
        *("mcp_tool_use", "mcp_tool_result", "container_upload", "tool_reference", "browser_state"),
    )
)
"""Types of what tools of Anthropic's servers left behind, without a text for the prompt."""
ROLES_OF_BLOCKS = {"tool_use": "assistant", "tool_result": "user"}


def _as_blocks(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _type_of(block: object) -> object:
    block_type = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return "left_out" if isinstance(block_type, str) and block_type in LEFT_OUT else block_type


class TextBlock(RequestModel):
    """A piece of text."""

    type: Literal["text"]
    text: str


Text = Annotated[
    Items[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])
]
"""A string, or blocks of text."""


class SearchResultBlock(RequestModel):
    """A passage that the client found."""

    type: Literal["search_result"]
    source: str
    title: str
    content: Items[TextBlock]

    @property
    def text(self) -> str:
        """The passage under its title."""
        return "\n".join((self.title, self.source, *(block.text for block in self.content)))


class PlainSource(RequestModel):
    """A text."""

    type: Literal["text"]
    data: str
    media_type: str | None = None

    @property
    def text(self) -> str:
        return self.data


class BlockSource(RequestModel):
    """A text in blocks."""

    type: Literal["content"]
    content: Text

    @property
    def text(self) -> str:
        return "\n".join(block.text for block in self.content)


class DocumentBlock(RequestModel):
    """A document; only text is supported."""

    type: Literal["document"]
    source: Annotated[
        Annotated[PlainSource, Tag("text")] | Annotated[BlockSource, Tag("content")],
        Discriminator(
            _type_of,
            custom_error_type="document_source",
            custom_error_message="must be of type 'text' or 'content': other documents are not supported",
        ),
    ]
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        """The text under its title."""
        return "\n".join(filter(None, (self.title, self.context, self.source.text)))


class LeftOutBlock(RequestModel):
    """A block of `LEFT_OUT`."""

    is_open: ClassVar[bool] = True
    type: str


class ToolUseBlock(RequestModel):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ResultContent = Annotated[
    Items[
        Annotated[
            Annotated[TextBlock, Tag("text")]
            | Annotated[SearchResultBlock, Tag("search_result")]
            | Annotated[DocumentBlock, Tag("document")]
            | Annotated[LeftOutBlock, Tag("left_out")],
            Discriminator(
                _type_of,
                custom_error_type="content_block",
                custom_error_message="must be a block of type 'text', 'search_result' or "
                "'document': images and all others are not supported",
            ),
        ]
    ],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[Any]),
]
"""A string, or blocks."""


class ToolResultBlock(RequestModel):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: ResultContent | None = None
    is_error: bool | None = None


class ThinkingBlock(RequestModel):
    """The assistant's thought, for templates that use it."""

    type: Literal["thinking"]
    thinking: str = ""
    signature: str | None = None
    """Not checked."""


class RedactedThinkingBlock(RequestModel):
    """A thought that Anthropic's servers hid, and that templates do not get."""

    type: Literal["redacted_thinking"]


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[LeftOutBlock, Tag("left_out")],
    Discriminator(
        _type_of,
        custom_error_type="content_block",
        custom_error_message="must be a block of type 'text', 'tool_use', 'tool_result', 'thinking', "
        "'search_result' or 'document': images and all others are not supported",
    ),
]
Content = Annotated[
    Items[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])
]
"""A string, or blocks."""


def joined(blocks: Iterable[object]) -> str:
    """Return the texts of one turn, one a line, without the assistant's thoughts."""
    texts = TextBlock, SearchResultBlock, DocumentBlock
    return "\n".join(block.text for block in blocks if isinstance(block, texts))


def left_out(blocks: Iterable[Block]) -> Iterator[str]:
    """Yield the types of the blocks that the prompt does not have, those in results among them."""
    for block in blocks:
        if isinstance(block, LeftOutBlock):
            yield block.type
        elif isinstance(block, ToolResultBlock):
            yield from (one.type for one in block.content or () if isinstance(one, LeftOutBlock))


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

    scope = FieldScope.MESSAGE

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
    """1 does not restrict the tokens."""
    top_k: Int32 | None = None
    """0 does not restrict the tokens."""
