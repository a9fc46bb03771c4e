"""The turns of a conversation in the form of OpenAI and TGI."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Discriminator, Field, Tag, model_validator
from typing_extensions import TypeAliasType

from millrace_router.api.body.fields import Items, RequestModel
from millrace_router.api.body.tools import without_functions
from millrace_router.errors import ValidationError
from millrace_router.request.dialect import Dialect
from millrace_router.text.template_messages import THOUGHT, Message


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
        """Text for the template."""
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
    """What a turn says; TGI has this name for it."""

    content: MessageContent | None = None
    tool_calls: Items[ToolCall] | None = None


class ChatMessage(MessageBody):
    """One turn; it has content, tool calls, or both."""

    role: str
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    """Not in either contract: the assistant's thought, for templates that ask for it."""
    reasoning: Any = None
    """Another server's name, like the one below; what is no text is ignored."""
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
        given = (self.reasoning_content, self.reasoning, self.thinking)
        return next((one for one in given if isinstance(one, str) and one), None)

    def for_template(self, dialect: Dialect) -> Message:
        """Translate, with the structure of the content; raises ValidationError for a part that is no text."""
        content = None if self.content is None else template_content(self.content, dialect)
        given: Message = {"role": self.role, "content": content}
        if self.tool_calls:
            given["tool_calls"] = [
                called(
                    call.id, call.function.name, call.function.arguments, call.type or "function"
                )
                for call in self.tool_calls
            ]
        named = {"tool_call_id": self.tool_call_id, "name": self.name, THOUGHT: self.thought}
        given |= {key: value for key, value in named.items() if value is not None}
        return given


def template_content(content: MessageContent, dialect: Dialect) -> str | list[dict[str, str]]:
    """Return text, or parts of text, for a template; raises ValidationError for a part that is no text."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": _text_of(part, dialect)} for part in content]


def _text_of(part: ContentPart, dialect: Dialect) -> str:
    if isinstance(part, MediaPart) or (isinstance(part, ImagePart) and not dialect.takes_images):
        raise ValidationError(
            f"content of type `{part.type}` is not supported: this model reads text alone"
        )
    return part.text


def called(id_: str | None, name: str, arguments: object, kind: str = "function") -> dict[str, Any]:
    """Return a call as templates take it; `arguments` are JSON text or the object itself."""
    return {"id": id_, "type": kind, "function": {"name": name, "arguments": arguments}}
