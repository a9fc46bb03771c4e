"""The turns of a conversation in the form of OpenAI and TGI, its tools, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Discriminator, Field, Tag, model_validator
from typing_extensions import TypeAliasType

from millrace_router.api.body.fields import Items, NullIs, RequestModel
from millrace_router.errors import BodyShapeError, ImageInvalid, ToolError, ValidationError
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.images import ImageSource
from millrace_router.request.limits import NO_ENCODER, Dialect
from millrace_router.text.template_messages import THOUGHT, Message, image_part
from millrace_router.tool_calls.text_tool import arguments_of
from millrace_router.tool_calls.tool import Tool, ToolChoice, tool_not_found

EXCLUSIVE = "Grammar and tools are mutually exclusive"
RESULT = "tool"
"""The role of a tool's result."""
MAX_NAME_CHARS = 100
"""Characters of an unknown name in a message."""
Word = Literal["auto", "none", "required"]
WORDS: Mapping[str, Word] = {"auto": "auto", "none": "none", "required": "required"}


def check_exclusive(tools: object, request: GenerationRequest, dialect: Dialect) -> None:
    """Raise ToolError for tools together with a grammar if the dialect refuses them."""
    if dialect.refuses_tools_with_format and tools is not None and request.grammar is not None:
        raise ToolError(EXCLUSIVE)


PARAMETERS = frozenset(("parameters", "arguments", "input_schema", "inputSchema"))
LOST_PARAMETERS = frozenset(("schema", "json_schema", "params", "args", "args_schema"))
"""Names that clients give to the schema of parameters, and no server reads."""


class FunctionDefinition(RequestModel):
    """A function that the model may call; `arguments` is TGI's name of `parameters`, and the others are MCP's."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        validation_alias=AliasChoices("parameters", "arguments", "input_schema", "inputSchema"),
        default=None,
    )
    """A JSON schema; None for a function without parameters."""
    strict: bool | None = None
    """Whether the arguments of every call match `parameters`."""

    def as_tool(self) -> Tool:
        return new_tool(self.name, self.description, self.parameters, strict=self.strict)


class ToolDefinition(RequestModel):
    """A tool; only functions are supported."""

    type: str | None = "function"
    function: FunctionDefinition | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_parameters_in_place(cls, value: object) -> object:
        function = value.get("function") if isinstance(value, dict) else None
        if isinstance(value, dict) and isinstance(function, dict):
            outside = PARAMETERS & value.keys()
            inside = set() if PARAMETERS & function.keys() else LOST_PARAMETERS & function.keys()
            for name in sorted(outside | inside):
                raise ValueError(f"`{name}` is not read: a schema belongs to `function.parameters`")
        return value

    def as_tool(self) -> Tool:
        """Translate; raises ToolError for another kind."""
        if self.type not in {None, "function"}:
            raise ToolError(f"tools of type `{str(self.type)[:MAX_NAME_CHARS]}` are not supported")
        if self.function is None:
            raise ToolError("a tool of type `function` needs a `function`")
        return self.function.as_tool()


def as_tools(definitions: Sequence[ToolDefinition] | None) -> tuple[Tool, ...]:
    """Translate all tools of a body; raises ToolError."""
    return tuple(definition.as_tool() for definition in definitions or ())


def without_functions(value: object, **replacements: str) -> object:
    """Return `value`; raises ValueError for a field of OpenAI's function calling, which tools have replaced."""
    if isinstance(value, dict):
        for name, replacement in replacements.items():
            if value.get(name) is not None:
                raise ValueError(f"`{name}` is not supported: use `{replacement}`")
    return value


class FunctionName(RequestModel):
    """A function by its name."""

    name: str


class NamedTool(RequestModel):
    """A choice of one tool, which the model must call."""

    type: Literal["function"] | None = "function"
    function: FunctionName


class AllowedTools(RequestModel):
    """The tools that the model may call in this turn."""

    mode: Literal["auto", "required"] = "auto"
    tools: Items[NamedTool] = Field(min_length=1)


class AllowedToolsChoice(RequestModel):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoiceField = TypeAliasType("ToolChoiceField", Word | str | NamedTool | AllowedToolsChoice)
"""A word, or a function: by its bare name as in TGI, or in OpenAI's form."""


def new_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, *, strict: bool | None
) -> Tool:
    """Return a tool, with the defaults of OpenAI's API."""
    return Tool(
        name=name,
        description=description,
        parameters=parameters or {"type": "object", "properties": {}},
        strict=bool(strict),
    )


def choose(
    tools: tuple[Tool, ...], choice: ToolChoiceField | None, *, parallel: bool
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Return the tools that may be called, and the choice among them; raises ToolError."""
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        names = [named.function.name for named in allowed.tools]
        return only(tools, names), ToolChoice(allowed.mode, None, parallel)
    if isinstance(choice, NamedTool):
        return choose_named(tools, choice.function.name, parallel=parallel)
    name = "auto" if choice is None else choice
    if name in WORDS:
        return choose_by_word(tools, WORDS[name], parallel=parallel)
    return choose_named(tools, name, parallel=parallel)


def choose_by_word(
    tools: tuple[Tool, ...], word: Word, *, parallel: bool
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Return all tools and the choice; raises ToolError where a call is required but tools are missing."""
    if word == "required" and not tools:
        raise ToolError("a call is `required`, but there are no `tools`")
    return tools, ToolChoice(word, None, parallel)


def choose_named(
    tools: tuple[Tool, ...], name: str, *, parallel: bool
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Return the tool with the name, and the choice; raises ToolError if no tool has it."""
    (chosen,) = only(tools, [name])
    return tools, ToolChoice("named", chosen.name, parallel)


def only(tools: tuple[Tool, ...], names: Sequence[str]) -> tuple[Tool, ...]:
    """Return the tools with the names, each once; raises ToolError for a name that no tool has."""
    by_name = {tool.name: tool for tool in tools}
    for name in names:
        if name not in by_name:
            raise tool_not_found(name, list(by_name))
    return tuple(by_name[name] for name in dict.fromkeys(names))


class TextPart(RequestModel):
    """A piece of text in a message; some clients keep it as a string, or null for an empty one."""

    type: Literal["text", "input_text", "output_text"]
    text: Annotated[str, NullIs(str)]

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: object) -> object:
        return {"type": "text", "text": value} if isinstance(value, str) else value


class RefusalPart(RequestModel):
    """The assistant's refusal to answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class Url(RequestModel):
    """The address of an image; some clients send the string itself."""

    url: str
    detail: Any = None
    """How many pixels the model gets: `low` for few."""

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: object) -> object:
        return {"url": value} if isinstance(value, str) else value


class ImagePart(RequestModel):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: Url

    @property
    def text(self) -> str:
        """Text for the template, in TGI's markdown."""
        return f"![]({self.image_url.url})"

    def source(self, part: str) -> ImageSource:
        """Return the image at `part` of the body; raises ImageInvalid."""
        return image_source(self.image_url.url, part, self.image_url.detail)


class ForeignPart(RequestModel):
    """A kind of content that no model here reads: media, and what other servers left behind.

    In an earlier turn a note stands for it in the prompt, since it would end the conversation; none for thoughts.
    """

    is_open: ClassVar[bool] = True
    type: str


class InputImagePart(ForeignPart):
    """An image in the form of OpenAI's responses; a model that reads only text has it like other foreign parts."""

    image_url: Any = None
    file_id: Any = None
    detail: Any = None

    def source(self, part: str) -> ImageSource:
        """Return the image at `part` of the body; raises ImageInvalid."""
        if not isinstance(self.image_url, str):
            raise ImageInvalid(part, "has no `image_url`: files are not stored here")
        return image_source(self.image_url, part, self.detail)


def image_source(url: str, part: str, detail: object = None) -> ImageSource:
    """Return an image as a client names it; raises ImageInvalid for an unknown detail."""
    if detail not in DETAILS:
        raise ImageInvalid(
            part, f"has a `detail` that is not one of {', '.join(map(str, DETAILS[1:]))}"
        )
    return ImageSource(url, part, "low" if detail == "low" else "auto")


DETAILS = (None, "auto", "low", "high", "original")
"""All but `low` give the model the pixels that its settings give."""
THOUGHTS = frozenset(("thinking", "redacted_thinking", "reasoning", "reasoning_text"))
"""Types of parts that templates do not get."""
_TAGS = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    "refusal": "refusal",
    "image_url": "image",
    "input_image": "input_image",
}


def _kind_of_part(part: object) -> str | None:
    """Return the tag of a part's model, by its `type`."""
    if isinstance(part, str):
        return "text"
    type_ = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return _TAGS.get(type_, "foreign") if isinstance(type_, str) else None


ContentPart = TypeAliasType(
    "ContentPart",
    Annotated[
        Annotated[TextPart, Tag("text")]
        | Annotated[RefusalPart, Tag("refusal")]
        | Annotated[ImagePart, Tag("image")]
        | Annotated[InputImagePart, Tag("input_image")]
        | Annotated[ForeignPart, Tag("foreign")],
        Discriminator(
            _kind_of_part,
            custom_error_type="content_part",
            custom_error_message="must be an object whose `type` is a text, such as 'text'",
        ),
    ],
)


def _kind_of_content(value: object) -> str:
    return "parts" if isinstance(value, list) else "text"


MessageContent = TypeAliasType(
    "MessageContent",
    Annotated[
        Annotated[str, Tag("text")] | Annotated[Items[ContentPart], Tag("parts")],
        Discriminator(_kind_of_content),
    ],
)
"""The union is discriminated by the type of the JSON value, so that an error names the wrong part."""


class CalledFunction(RequestModel):
    """A function that the assistant called; arguments are JSON text or the object itself."""

    name: str
    arguments: Any = Field(validation_alias=AliasChoices("arguments", "parameters"), default=None)
    description: str | None = None


class CalledCustom(RequestModel):
    """A `custom` tool that the assistant of another server called; its input is any text."""

    name: str
    input: Annotated[str, NullIs(str)]


class ToolCall(RequestModel):
    """A call in the history of a conversation."""

    id: str | None = None
    type: str | None = "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None

    @model_validator(mode="after")
    def _names_what_is_called(self) -> ToolCall:
        if self.function is None and self.custom is None:
            raise ValueError("a call needs a `function`")
        return self

    def for_template(self) -> dict[str, Any]:
        """Translate; a custom tool is a function with one parameter, `input`."""
        if self.function is not None:
            return called(
                self.id, self.function.name, self.function.arguments, self.type or "function"
            )
        assert self.custom is not None
        return called(self.id, self.custom.name, arguments_of(self.custom.input))


class MessageBody(RequestModel):
    """The content of a turn, by TGI's name."""

    content: MessageContent | None = None
    tool_calls: Items[ToolCall] | None = None


class ChatMessage(MessageBody):
    """One turn; it has content, tool calls, or both."""

    role: str
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    """Neither TGI's nor OpenAI's: the assistant's thought, for templates that use it."""
    reasoning: Any = None
    """Another server's name, like the one below; a value that is not text is ignored."""
    thinking: Any = None

    @model_validator(mode="before")
    @classmethod
    def _has_no_function_call(cls, value: object) -> object:
        return without_functions(value, function_call="tool_calls")

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.role == "function":
            raise ValueError("the role `function` is not supported: use `tool`")
        # What a client kept of an empty answer or result cannot be refused: it would end the conversation.
        is_kept = self.role in {"assistant", RESULT}
        if self.content is None and not (self.tool_calls or self.thought or is_kept):
            raise ValueError("a message needs `content` or `tool_calls`")
        return self

    @property
    def thought(self) -> str | None:
        """The assistant's thought, whatever its name."""
        thoughts = (self.reasoning_content, self.reasoning, self.thinking)
        return next((one for one in thoughts if isinstance(one, str) and one), None)

    def for_template(
        self, dialect: Dialect, *, is_last: bool = True, part: str = "content"
    ) -> Message:
        """Translate, with the structure of the content at `part`; raises ValidationError as `template_content`."""
        content = None
        if self.content is None and dialect.has_tgi_errors and not self.tool_calls:
            raise BodyShapeError("a message needs `content` or `tool_calls`", field="messages")
        if self.content is not None:
            is_kept = self.role == RESULT or not is_last
            content = template_content(self.content, dialect, is_kept=is_kept, part=part)
        message: Message = {"role": self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        named = {"tool_call_id": self.tool_call_id, "name": self.name, THOUGHT: self.thought}
        message |= {key: value for key, value in named.items() if value is not None}
        return message


def for_template(messages: Sequence[ChatMessage], dialect: Dialect) -> list[Message]:
    """Translate all turns; raises ValidationError for a part of the last one that is not text."""
    last = len(messages) - 1
    return [
        message.for_template(dialect, is_last=index == last, part=f"messages.{index}.content")
        for index, message in enumerate(messages)
    ]


def template_content(
    content: MessageContent, dialect: Dialect, *, is_kept: bool, part: str
) -> str | list[dict[str, Any]]:
    """Return text, or parts, for a template; raises ValidationError for a part that the model does not read.

    Where it `is_kept`, in the result of a tool and in an earlier turn, a note stands for such a part, which would end
    the conversation. `part` is where the content is in the body.
    """
    if isinstance(content, str):
        return content
    return [
        _part_for_template(one, dialect, is_kept=is_kept, name=f"{part}.{index}")
        for index, one in enumerate(content)
        if not (is_kept and one.type in THOUGHTS)
    ]


def _part_for_template(
    part: ContentPart, dialect: Dialect, *, is_kept: bool, name: str
) -> dict[str, Any]:
    if dialect.reads_images and isinstance(part, ImagePart | InputImagePart):
        return image_part(part.source(name))
    return {"type": "text", "text": _text_of(part, dialect, is_kept=is_kept, name=name)}


def _text_of(part: ContentPart, dialect: Dialect, *, is_kept: bool, name: str) -> str:
    if isinstance(part, ForeignPart) or (isinstance(part, ImagePart) and not dialect.takes_images):
        if is_kept:
            return note_of(part.type)
        reads = "text and images" if dialect.reads_images else "text"
        if dialect.lacks_encoder and "image" in part.type:
            reads += f": {NO_ENCODER}"
        raise ValidationError(
            f"content of type `{part.type[:MAX_NAME_CHARS]}` is not supported: this model reads only {reads}"
            f" (`{name}`)"
        )
    return part.text


def note_of(content_type: str) -> str:
    """Return the text in place of content that is not text."""
    kind = content_type.removeprefix("input_").removesuffix("_url")
    return f"[{kind[:MAX_NAME_CHARS]} left out]"


def foreign_in(content: object) -> Iterator[str]:
    """Yield the types of the parts of content that are not text."""
    for part in content if isinstance(content, list | tuple) else ():
        if isinstance(part, ForeignPart | ImagePart):
            yield part.type


def called(
    id_: str | None, name: str, arguments: object, call_type: str = "function"
) -> dict[str, Any]:
    """Return a call as templates take it; `arguments` are JSON text or the object itself."""
    return {"id": id_, "type": call_type, "function": {"name": name, "arguments": arguments}}
