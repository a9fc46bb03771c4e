"""The turns of a conversation in the form of OpenAI and TGI, its tools, and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Discriminator, Field, Tag, model_validator
from typing_extensions import TypeAliasType

from millrace_router.api.body.fields import Items, RequestModel
from millrace_router.errors import ToolError, ValidationError
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.limits import Dialect
from millrace_router.text.template_messages import THOUGHT, Message
from millrace_router.tool_calls.tool import Tool, ToolChoice

EXCLUSIVE = "Grammar and tools are mutually exclusive"
MAX_NAME_CHARS = 100
"""Characters of an unknown name in a message."""
Word = Literal["auto", "none", "required"]
WORDS: Mapping[str, Word] = {"auto": "auto", "none": "none", "required": "required"}


def check_exclusive(tools: object, request: GenerationRequest, dialect: Dialect) -> None:
    """Raise ToolError for tools together with a grammar if the dialect refuses them."""
    if dialect.refuses_tools_with_format and tools is not None and request.grammar is not None:
        raise ToolError(EXCLUSIVE)


class FunctionDefinition(RequestModel):
    """A function that the model may call; `arguments` is TGI's name of `parameters`."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        validation_alias=AliasChoices("parameters", "arguments"), default=None
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
            raise ToolError(f"Tool with name {name[:MAX_NAME_CHARS]} not found")
    return tuple(by_name[name] for name in dict.fromkeys(names))


class TextPart(RequestModel):
    """A piece of text in a message."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(RequestModel):
    """The assistant's refusal to answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class Url(RequestModel):
    """The address of an image."""

    url: str


class ImagePart(RequestModel):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: Url

    @property
    def text(self) -> str:
        """Text for the template, in TGI's markdown."""
        return f"![]({self.image_url.url})"


class MediaPart(RequestModel):
    """A kind of content that no model here reads."""

    type: Literal["input_image", "input_audio", "input_file", "file", "audio_url", "video_url"]


ContentPart = TypeAliasType(
    "ContentPart",
    Annotated[TextPart | RefusalPart | ImagePart | MediaPart, Field(discriminator="type")],
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


class ToolCall(RequestModel):
    """A call in the history of a conversation."""

    id: str | None = None
    type: str | None = "function"
    function: CalledFunction


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
        if self.content is None and not (self.tool_calls or self.thought):
            raise ValueError("a message needs `content` or `tool_calls`")
        return self

    @property
    def thought(self) -> str | None:
        """The assistant's thought, whatever its name."""
        thoughts = (self.reasoning_content, self.reasoning, self.thinking)
        return next((one for one in thoughts if isinstance(one, str) and one), None)

    def for_template(self, dialect: Dialect) -> Message:
        """Translate, with the structure of the content; raises ValidationError for a part that is not text."""
        content = None if self.content is None else template_content(self.content, dialect)
        message: Message = {"role": self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [
                called(
                    call.id, call.function.name, call.function.arguments, call.type or "function"
                )
                for call in self.tool_calls
            ]
        named = {"tool_call_id": self.tool_call_id, "name": self.name, THOUGHT: self.thought}
        message |= {key: value for key, value in named.items() if value is not None}
        return message


def for_template(messages: Sequence[ChatMessage], dialect: Dialect) -> list[Message]:
    """Translate all turns; raises ValidationError for a part that is not text."""
    return [message.for_template(dialect) for message in messages]


def template_content(content: MessageContent, dialect: Dialect) -> str | list[dict[str, str]]:
    """Return text, or parts of text, for a template; raises ValidationError for a part that is not text."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": _text_of(part, dialect)} for part in content]


def _text_of(part: ContentPart, dialect: Dialect) -> str:
    if isinstance(part, MediaPart) or (isinstance(part, ImagePart) and not dialect.takes_images):
        raise ValidationError(
            f"content of type `{part.type}` is not supported: this model reads only text"
        )
    return part.text


def called(
    id_: str | None, name: str, arguments: object, call_type: str = "function"
) -> dict[str, Any]:
    """Return a call as templates take it; `arguments` are JSON text or the object itself."""
    return {"id": id_, "type": call_type, "function": {"name": name, "arguments": arguments}}
