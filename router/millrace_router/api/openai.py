"""OpenAI's requests as strict models, and what they mean in TGI's parameters."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import AliasChoices, Field, model_validator

from millrace_router.api.native import UINT64_MAX, Float32, OpenAIParameters, RequestModel, UInt32
from millrace_router.errors import SuffixNotSupported, ToolError, ValidationError

Seed = Annotated[int, Field(ge=-(2**63), le=UINT64_MAX)]
MAX_PENALTY = 2.0
Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list of which only the first mistake is looked for: a million of them would take seconds to collect."""


class StreamOptions(RequestModel):
    """What a stream carries besides text."""

    include_usage: bool | None = None


class CommonRequest(RequestModel):
    """Fields that both routes have; null means absent throughout."""

    model: str | None = None
    max_tokens: UInt32 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    stop: str | Items[str] | None = None
    temperature: Float32 | None = None
    top_p: Float32 | None = None
    frequency_penalty: Float32 | None = None
    presence_penalty: Float32 | None = None
    repetition_penalty: Float32 | None = None
    n: int | None = None
    logit_bias: dict[str, Any] | list[Any] | None = None
    """Refused, so nobody looks into it."""
    ignore_eos: bool | None = None
    priority: int | None = None
    """Not in OpenAI's: how much sooner than others; beats the header `x-priority`."""

    @property
    def stop_sequences(self) -> list[str]:
        """Stop strings; an empty one stops nothing."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of its own for usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """Refuse what would otherwise be ignored in silence; raises RouterError."""
        if self.n is not None and self.n != 1:
            raise ValidationError(f"`n` != 1 is not supported. Given: {self.n}")
        if self.logit_bias:
            raise ValidationError("`logit_bias` is not supported")
        for name in ("frequency_penalty", "presence_penalty"):
            penalty = getattr(self, name)
            if penalty is not None and not -MAX_PENALTY <= penalty <= MAX_PENALTY:
                raise ValidationError(f"`{name}` must be >= -2.0 and <= 2.0")

    def parameters(self, *, top_n_tokens: int | None = None) -> OpenAIParameters:
        """Translate: temperature 0 is greedy, anything else samples; `top_p` 1 is no restriction."""
        greedy = self.temperature == 0
        return OpenAIParameters(
            temperature=None if greedy else self.temperature,
            top_p=None if greedy or self.top_p == 1 else self.top_p,
            do_sample=not greedy,
            repetition_penalty=self.repetition_penalty,
            occurrence_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            max_new_tokens=self.max_tokens,
            stop=self.stop_sequences,
            seed=None if self.seed is None else self.seed & UINT64_MAX,
            top_n_tokens=top_n_tokens,
            ignore_eos=bool(self.ignore_eos),
            priority=self.priority,
            details=True,
        )


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
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Not in TGI: further variables for the template, such as `enable_thinking`."""

    def check(self) -> None:
        """Refuse what would otherwise be ignored in silence; raises RouterError."""
        super().check()
        if self.tools and self.tool_choice != "none":
            raise ToolError("`tools` are not supported yet")
        if self.response_format and self.response_format.get("type") != "text":
            raise ValidationError("`response_format` is not supported yet")

    def parameters(self, *, top_n_tokens: int | None = None) -> OpenAIParameters:
        """Translate; `max_completion_tokens` is the newer name of `max_tokens` and beats it."""
        parameters = super().parameters(
            top_n_tokens=self.top_logprobs if self.logprobs else top_n_tokens
        )
        if self.max_completion_tokens is None:
            return parameters
        return parameters.model_copy(update={"max_new_tokens": self.max_completion_tokens})


class CompletionRequest(CommonRequest):
    """Body of `/v1/completions`."""

    prompt: str | Annotated[list[str], Field(min_length=1, fail_fast=True)]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> list[str]:
        """All prompts, in the order of the choices."""
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt

    def check(self) -> None:
        """Refuse what would otherwise be ignored in silence; raises RouterError."""
        super().check()
        if self.suffix:
            raise SuffixNotSupported
        if self.echo:
            raise ValidationError("`echo` is not supported")
        if self.logprobs is not None:
            raise ValidationError("`logprobs` is not supported on this endpoint")
        if self.best_of is not None and self.best_of != 1:
            raise ValidationError(f"`best_of` != 1 is not supported. Given: {self.best_of}")
