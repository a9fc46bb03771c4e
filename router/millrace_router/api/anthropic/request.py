"""Anthropic's request for a message as strict models; features that only Anthropic's servers have are refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from millrace_router.api.body.fields import (
    UINT32_MAX,
    FieldScope,
    Float32,
    Int32,
    Items,
    Messages,
    NullIs,
    RequestModel,
    Tools,
)
from millrace_router.api.body.grammars import FormOfText
from millrace_router.api.body.messages import note_of
from millrace_router.errors import ImageInvalid, ValidationError, quoted
from millrace_router.request.images import ImageSource
from millrace_router.request.limits import NO_ENCODER, Dialect

LEFT_OUT = frozenset(("container_upload", "tool_reference", "browser_state"))
LEFT_OUT_ENDS = ("_tool_use", "_tool_result")
"""Types, and ends of types, of what is not text, and of what tools of Anthropic's servers left behind."""
BILLING = "x-anthropic-billing-header:"
"""Beginning of the first block of Claude Code's system prompt."""
READ = frozenset(
    (
        *("text", "search_result", "document", "tool_use", "tool_result", "thinking"),
        *("redacted_thinking", "compaction"),
    )
)
"""Types that the prompt has."""
MEDIA_SOURCES = ("base64", "url", "file")
"""Types of the sources of documents that are not text."""
KINDS = "type 'text', 'tool_use', 'tool_result', 'thinking', 'search_result' or 'document': others are not supported"
ROLES_OF_BLOCKS = {"tool_use": "assistant", "tool_result": "user"}


def _as_blocks(content: object) -> object:
    if content is None:
        return []
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _type_of(block: object) -> object:
    return block.get("type") if isinstance(block, dict) else getattr(block, "type", None)


def _kind_of(block: object) -> str | None:
    """Return the tag of a block's model: its type, if that is the same."""
    if isinstance(block, RequestModel):
        return _KINDS.get(type(block), str(_type_of(block)))
    block_type = _type_of(block)
    if not isinstance(block_type, str):
        return None
    if block_type == "image":
        return "image"
    if block_type in LEFT_OUT or (block_type.endswith(LEFT_OUT_ENDS) and block_type not in READ):
        return "left_out"
    source = block.get("source") if isinstance(block, dict) else None
    if block_type == "document" and isinstance(source, dict):
        return "left_out" if source.get("type") in MEDIA_SOURCES else "document"
    return block_type if block_type in READ else "foreign"


class TextBlock(RequestModel):
    """A piece of text."""

    type: Literal["text"]
    text: Annotated[str, NullIs(str)]


Text = Annotated[
    Items[TextBlock],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock] | None),
]
"""A string, or blocks of text; null is none."""


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
    """A block of `LEFT_OUT`, or a document that is not text: a note stands for it in the prompt."""

    is_open: ClassVar[bool] = True
    type: str

    @property
    def text(self) -> str:
        return note_of(self.type)


class ImageBlock(LeftOutBlock):
    """A picture; a note stands for it in the prompt of a model that reads only text."""

    source: Any = None

    def image(self, part: str) -> ImageSource:
        """Return the picture at `part` of the body; raises ImageInvalid."""
        source = self.source if isinstance(self.source, dict) else {}
        match source:
            case {"type": "base64", "data": str(data)}:
                media_type = source.get("media_type")
                named = media_type if isinstance(media_type, str) else ""
                return ImageSource(f"data:{named};base64,{data}", part)
            case {"type": "url", "url": str(url)}:
                return ImageSource(url, part)
        raise ImageInvalid(part, "has a source that is not of type `base64` or `url`")


class ForeignBlock(LeftOutBlock):
    """A block of an unknown type; refused in the last turn, since it would end the conversation in an earlier one."""


class CompactionBlock(RequestModel):
    """The summary of all that precedes it, which the prompt has in place of that; null does nothing."""

    type: Literal["compaction"]
    content: Annotated[str, Field(min_length=1)] | None = None


class ToolUseBlock(RequestModel):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Any = None
    """An object; clients may keep the text of a call that was cut, or null in place of no arguments."""

    @property
    def arguments(self) -> str:
        """The arguments as JSON, or as the text that there is."""
        return (
            self.input if isinstance(self.input, str) else orjson.dumps(self.input or {}).decode()
        )


ResultContent = Annotated[
    Items[
        Annotated[
            Annotated[TextBlock, Tag("text")]
            | Annotated[SearchResultBlock, Tag("search_result")]
            | Annotated[DocumentBlock, Tag("document")]
            | Annotated[ImageBlock, Tag("image")]
            | Annotated[LeftOutBlock, Tag("left_out")]
            | Annotated[ForeignBlock, Tag("foreign")],
            Discriminator(
                _kind_of,
                custom_error_type="content_block",
                custom_error_message="must be a block of type 'text', 'search_result' or 'document'",
            ),
        ]
    ],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[Any] | None),
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
    thinking: Annotated[str, NullIs(str)] = ""
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
    | Annotated[CompactionBlock, Tag("compaction")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[LeftOutBlock, Tag("left_out")]
    | Annotated[ForeignBlock, Tag("foreign")],
    Discriminator(
        _kind_of,
        custom_error_type="content_block",
        custom_error_message=f"must be a block of {KINDS}",
    ),
]
_KINDS: dict[type, str] = {LeftOutBlock: "left_out", ForeignBlock: "foreign"}
Content = Annotated[
    Items[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block] | None)
]
"""A string, or blocks; null is a turn without any."""


def joined(blocks: Iterable[object]) -> str:
    """Return the texts of one turn, one a line, without the assistant's thoughts."""
    texts = TextBlock, SearchResultBlock, DocumentBlock, LeftOutBlock
    return "\n".join(
        block.text
        for block in blocks
        if isinstance(block, texts) and not block.type.endswith("_tool_use")
    )


def left_out(blocks: Iterable[Block]) -> Iterator[str]:
    """Yield the types of the blocks that the prompt does not have, those in results among them."""
    for block in blocks:
        is_failed = isinstance(block, CompactionBlock) and block.content is None
        if is_failed or isinstance(block, LeftOutBlock | RedactedThinkingBlock):
            yield block.type
        elif isinstance(block, ToolResultBlock):
            yield from (one.type for one in block.content or () if isinstance(one, LeftOutBlock))


def foreign_in(blocks: Iterable[Block]) -> Iterator[str]:
    """Yield the types of blocks that are unknown, those in results among them."""
    for block in blocks:
        inner = block.content or () if isinstance(block, ToolResultBlock) else ()
        yield from (one.type for one in (block, *inner) if isinstance(one, ForeignBlock))


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
    tool_type = tool.get("type")
    return "custom" if tool_type is None or tool_type == "custom" else "left_out"


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
    display: str | None = None
    """With `omitted` the answer lacks the thought."""


class MessagesOutputFormat(FormOfText):
    """A schema that the text has to match."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class MessagesOutput(FormOfText):
    """The form of the answer."""

    format: MessagesOutputFormat | None = None
    effort: str | None = None
    """How much the model is to think; templates get it as `reasoning_effort`."""


class CountTokensRequest(RequestModel):
    """Body of `/v1/messages/count_tokens`: the parts of the prompt; null means absent."""

    scope = FieldScope.MESSAGE

    model: str | None = None
    messages: Messages[MessagesTurn] = Field(min_length=1)
    system: Text | None = None
    tools: (
        Tools[
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

    @model_validator(mode="after")
    def _can_be_answered(self) -> CountTokensRequest:
        blocks = self.messages[-1].content
        for type_ in foreign_in(blocks):
            raise ValueError(f"{quoted(type_)} is not the type of a block: it must be {KINDS}")
        return self

    def check_last_turn(self, dialect: Dialect) -> None:
        """Raise ValidationError if the last turn has nothing that the model reads.

        A client adds the user's next text to such a turn, so that no later request is refused for it.
        """
        blocks = self.messages[-1].content
        read = (ImageBlock,) if dialect.reads_images else ()
        reason = f"; {NO_ENCODER}" if dialect.lacks_encoder else ""
        if blocks and all(
            isinstance(block, LeftOutBlock) and not isinstance(block, read) for block in blocks
        ):
            raise ValidationError(
                f"the last turn has only {quoted(blocks[0].type)} (`messages.{len(self.messages) - 1}.content.0`):"
                f" images and documents that are not text are not supported{reason}"
            )

    @property
    def instructions(self) -> list[TextBlock]:
        """The system prompt, without a block that differs from session to session and is for Anthropic's servers."""
        blocks = self.system or []
        return [block for block in blocks if not block.text.startswith(BILLING)]

    @property
    def offered(self) -> list[MessagesTool]:
        """The tools that the model may call."""
        return [tool for tool in self.tools or () if isinstance(tool, MessagesTool)]

    def left_out(self) -> Iterator[str]:
        if len(self.instructions) < len(self.system or ()):
            yield "system.billing_header"
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
