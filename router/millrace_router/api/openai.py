"""OpenAI's requests as strict models, and what they mean in TGI's parameters."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import AliasChoices, Field, model_validator

from millrace_router.api.bias import biases_from
from millrace_router.api.fields import UINT64_MAX, Float32, Int32, RequestModel, UInt32
from millrace_router.api.grammar import ResponseFormat, grammar_of
from millrace_router.api.native import OpenAIParameters
from millrace_router.errors import SuffixNotSupported, ToolError, ValidationError
from millrace_router.limits import Limits

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
    n: int | None = None
    logit_bias: dict[str, Any] | Annotated[list[Any], Field(max_length=0)] | None = None
    """An empty list is taken, too: TGI has lists here, and ignores them."""
    response_format: ResponseFormat | None = None
    repetition_penalty: Float32 | None = None
    """Not in OpenAI's, like everything that follows."""
    top_k: Int32 | None = None
    """0 and -1 are no restriction."""
    typical_p: Float32 | None = None
    """1 is no restriction."""
    min_p: Float32 | None = None
    """0 is no restriction."""
    ignore_eos: bool | None = None
    priority: int | None = None
    """How much sooner than others; beats the header `x-priority`."""

    @property
    def stop_sequences(self) -> list[str]:
        """Stop strings; an empty one stops nothing."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of its own for usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def num_choices(self) -> int:
        """Choices for each prompt."""
        return 1 if self.n is None else self.n

    def check(self, limits: Limits) -> None:
        """Check what only these routes have, and refuse what would be ignored in silence; raises RouterError."""
        if not 0 < self.num_choices <= limits.max_n:
            raise ValidationError(f"`n` must be > 0 and <= {limits.max_n}. Given: {self.n}")
        for name in ("frequency_penalty", "presence_penalty"):
            penalty = getattr(self, name)
            if penalty is not None and not -MAX_PENALTY <= penalty <= MAX_PENALTY:
                raise ValidationError(f"`{name}` must be >= -2.0 and <= 2.0")

    def parameters(self, *, top_n_tokens: int | None = None) -> OpenAIParameters:
        """Translate: temperature 0 is greedy, anything else samples; raises ValidationError."""
        greedy = self.temperature == 0
        return OpenAIParameters(
            temperature=None if greedy else self.temperature,
            top_p=None if greedy or self.top_p == 1 else self.top_p,
            top_k=None if greedy or self.top_k in {-1, 0} else self.top_k,
            typical_p=None if greedy or self.typical_p == 1 else self.typical_p,
            min_p=None if greedy else self.min_p,
            do_sample=not greedy,
            repetition_penalty=self.repetition_penalty,
            occurrence_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logit_bias=biases_from(self.logit_bias) if isinstance(self.logit_bias, dict) else (),
            grammar=grammar_of(self.response_format),
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

    @property
    def num_samples(self) -> int:
        """Samples of each prompt, of which the best are its choices."""
        return max(self.num_choices, self.best_of or 0)

    def check(self, limits: Limits) -> None:
        """Check what only this route has; raises RouterError."""
        super().check(limits)
        if self.suffix:
            raise SuffixNotSupported
        if self.echo:
            raise ValidationError("`echo` is not supported")
        if self.logprobs is not None:
            raise ValidationError("`logprobs` is not supported on this endpoint")
        if self.best_of is not None:
            self._check_best_of(self.best_of, limits)

    def _check_best_of(self, best_of: int, limits: Limits) -> None:
        if best_of < self.num_choices:
            raise ValidationError(
                f"`best_of` must be >= `n`. Given: {best_of} and {self.num_choices}"
            )
        if best_of == self.num_choices:
            return
        if best_of > limits.max_best_of:
            raise ValidationError(
                f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}"
            )
        if self.stream:
            raise ValidationError("`best_of` > `n` is not supported when streaming tokens")
        if self.temperature == 0:
            raise ValidationError("you must use sampling when `best_of` is > 1")
