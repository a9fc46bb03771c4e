"""The turns of a conversation, as OpenAI and TGI write them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Discriminator, Field, Tag, model_validator
from typing_extensions import TypeAliasType

from millrace_router.api.openai.chat_tools import without_functions
from millrace_router.api.openai.common_request import Items
from millrace_router.errors import ValidationError
from millrace_router.request.fields import RequestModel


class TextPart(RequestModel):
    """A piece of text in a message."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(RequestModel):
    """What the assistant said instead of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """Text for the template."""
        return self.refusal


class Url(RequestModel):
    """Where an image is."""

    url: str


class ImagePart(RequestModel):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: Url

    @property
    def text(self) -> str:
        """Text for the template: TGI's markdown."""
        return f"![]({self.image_url.url})"


class MediaPart(RequestModel):
    """What no model here can read."""

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
"""Told apart by what is there, so that a mistake in a part is told as one."""


class CalledFunction(RequestModel):
    """Function that the assistant called; arguments are JSON text or the object itself."""

    name: str
    arguments: Any = Field(validation_alias=AliasChoices("arguments", "parameters"), default=None)
    description: str | None = None


class ToolCall(RequestModel):
    """Call in the history of a conversation."""

    id: str | None = None
    type: str | None = "function"
    function: CalledFunction


class ChatMessage(RequestModel):
    """One turn; it has content, tool calls, or both."""

    role: str
    content: MessageContent | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    """Not in either contract: what the assistant thought, for templates that ask for it."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_function_call(cls, value: object) -> object:
        return without_functions(value, function_call="tool_calls")

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.role == "function":
            raise ValueError("the role `function` is not supported: use `tool`")
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs `content` or `tool_calls`")
        return self

    def for_template(self, *, images: bool = False) -> dict[str, Any]:
        """Render with its structure; with `images` each is TGI's markdown, without they are refused.

        Raises:
            ValidationError: a part is no text.

        """
        content: Any = self.content
        if isinstance(content, list):
            content = [{"type": "text", "text": text} for text in _texts(content, images=images)]
        given: dict[str, Any] = {"role": self.role, "content": content}
        if self.tool_calls:
            given["tool_calls"] = [_called(call) for call in self.tool_calls]
        for key in ("tool_call_id", "name", "reasoning_content"):
            value = getattr(self, key)
            if value is not None:
                given[key] = value
        return given


def _texts(parts: list[ContentPart], *, images: bool) -> Iterator[str]:
    for part in parts:
        if isinstance(part, MediaPart) or (isinstance(part, ImagePart) and not images):
            raise ValidationError(
                f"content of type `{part.type}` is not supported: this model reads text alone"
            )
        yield part.text


def _called(call: ToolCall) -> dict[str, Any]:
    function = call.function
    return {
        "id": call.id,
        "type": call.type or "function",
        "function": {"name": function.name, "arguments": function.arguments},
    }
