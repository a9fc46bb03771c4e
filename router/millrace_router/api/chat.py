"""OpenAI's chat request as a strict model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import AliasChoices, Field, model_validator

from millrace_router.api.fields import RequestModel, UInt32
from millrace_router.api.native import OpenAIParameters
from millrace_router.api.openai import CommonRequest, Items
from millrace_router.errors import ToolError
from millrace_router.limits import Limits


class TextPart(RequestModel):
    """A piece of text in a message."""

    type: Literal["text"]
    text: str

    def as_text(self) -> str:
        """Text for the template."""
        return self.text


class ImageUrl(RequestModel):
    """Where an image is."""

    url: str


class ImagePart(RequestModel):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: ImageUrl

    def as_text(self) -> str:
        """Text for the template: TGI's markdown."""
        return f"![]({self.image_url.url})"


class FunctionCall(RequestModel):
    """Function that the assistant called; arguments are JSON text or the object itself."""

    name: str
    arguments: Any = Field(validation_alias=AliasChoices("arguments", "parameters"), default=None)
    description: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Render as TGI does: arguments always as text."""
        given = self.arguments
        text = given if isinstance(given, str) else orjson.dumps(given).decode()
        return {"description": self.description, "name": self.name, "arguments": text}


class ToolCall(RequestModel):
    """Call in the history of a conversation."""

    id: str
    type: str = "function"
    function: FunctionCall

    def as_json(self) -> dict[str, Any]:
        """Render as TGI does."""
        return {"id": self.id, "type": self.type, "function": self.function.as_json()}


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class ChatMessage(RequestModel):
    """One turn; it has content, tool calls, or both."""

    role: str
    content: str | Items[ContentPart] | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs `content` or `tool_calls`")
        return self

    def for_template(self) -> dict[str, Any]:
        """Flatten to what templates see: strings only, tool calls as their JSON."""
        optional = {"name": self.name, "tool_call_id": self.tool_call_id}
        given = {key: value for key, value in optional.items() if value is not None}
        return {"role": self.role, "content": self._text(), **given}

    def _text(self) -> str:
        if self.tool_calls and not self.content:
            return orjson.dumps([call.as_json() for call in self.tool_calls]).decode()
        if isinstance(self.content, str):
            return self.content
        return "".join(part.as_text() for part in self.content or [])


class ChatCompletionRequest(CommonRequest):
    """Body of `/v1/chat/completions` and `/chat_tokenize`."""

    messages: Items[ChatMessage] = Field(min_length=1)
    max_completion_tokens: UInt32 | None = None
    logprobs: bool | None = None
    top_logprobs: UInt32 | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Not in TGI: further variables for the template, such as `enable_thinking`."""

    def check(self, limits: Limits) -> None:
        """Check what only this route has; raises RouterError."""
        super().check(limits)
        if self.tools and self.tool_choice != "none":
            raise ToolError("`tools` are not supported yet")

    def parameters(self, *, top_n_tokens: int | None = None) -> OpenAIParameters:
        """Translate; `max_completion_tokens` is the newer name of `max_tokens` and beats it."""
        parameters = super().parameters(
            top_n_tokens=self.top_logprobs if self.logprobs else top_n_tokens
        )
        if self.max_completion_tokens is None:
            return parameters
        return parameters.model_copy(update={"max_new_tokens": self.max_completion_tokens})
