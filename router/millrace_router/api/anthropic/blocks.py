"""The blocks of Anthropic's messages as strict models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Tag

from millrace_router.api.body.fields import Items, RequestModel

LEFT_OUT = frozenset(
    (
        *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result"),
        *("code_execution_tool_result", "bash_code_execution_tool_result"),
        *("text_editor_code_execution_tool_result", "tool_search_tool_result"),
        *("mcp_tool_use", "mcp_tool_result", "container_upload", "tool_reference", "browser_state"),
    )
)
"""Types of what tools of Anthropic's servers left behind, without a text for the prompt."""


def _as_blocks(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _type_of(block: object) -> object:
    given = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return "left_out" if isinstance(given, str) and given in LEFT_OUT else given


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
        """The text."""
        return self.data


class BlockSource(RequestModel):
    """A text in blocks."""

    type: Literal["content"]
    content: Text

    @property
    def text(self) -> str:
        """The text."""
        return "\n".join(block.text for block in self.content)


class DocumentBlock(RequestModel):
    """A document; those that are no text are refused."""

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
    """Return the texts of one turn, each on a line of its own, without the assistant's thoughts."""
    texts = TextBlock, SearchResultBlock, DocumentBlock
    return "\n".join(block.text for block in blocks if isinstance(block, texts))


def left_out(blocks: Iterable[Block]) -> Iterator[str]:
    """Yield the types of the blocks that the prompt does not have, those in results among them."""
    for block in blocks:
        if isinstance(block, LeftOutBlock):
            yield block.type
        elif isinstance(block, ToolResultBlock):
            yield from (one.type for one in block.content or () if isinstance(one, LeftOutBlock))
