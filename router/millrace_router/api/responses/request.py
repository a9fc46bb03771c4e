"""OpenAI's request for a response as a strict model; fields that refer to stored responses are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from millrace_router.api.chat.sampling import SamplingFields
from millrace_router.api.fields import Items, Place, RequestModel, UInt32
from millrace_router.api.grammars import (
    JsonGrammar,
    LarkGrammar,
    RegexGrammar,
    TextFormat,
    raw_schema,
)
from millrace_router.api.responses.input import InputItem
from millrace_router.errors import ToolError, ValidationError
from millrace_router.request.grammar import RawGrammar

LOGPROBS = "message.output_text.logprobs"
"""The name in `include` that asks for log probabilities."""


class ResponsesTool(RequestModel):
    """A tool; functions alone are supported."""

    type: str = "function"
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Whether the arguments of every call match `parameters`; unlike OpenAI's, absent means false."""

    def check(self) -> None:
        """Raise ToolError unless it is a function that has a name."""
        if self.type != "function":
            raise ToolError(
                f"tools of type `{self.type[:40]}` are not supported: only functions are"
            )
        if not self.name:
            raise ToolError("a tool of type `function` needs a `name`")


class NamedFunction(RequestModel):
    """A function by its name."""

    type: Literal["function"]
    name: str


class AllowedFunctions(RequestModel):
    """The tools that the model may call in this turn."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Items[NamedFunction] = Field(min_length=1)


class SchemaTextFormat(RequestModel):
    """JSON as a schema describes it; the generated text is valid with and without `strict`."""

    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Any = Field(alias="schema", default=None)
    """None stands for any object."""
    strict: bool | None = None

    def raw(self) -> RawGrammar:
        """Translate."""
        return raw_schema(self.schema_)


class ResponsesText(RequestModel):
    """The form of the text."""

    format: SchemaTextFormat | TextFormat | JsonGrammar | RegexGrammar | LarkGrammar | None = Field(
        discriminator="type", default=None
    )


class ResponsesReasoning(RequestModel):
    """How much the model is to think."""

    effort: str | None = None
    """Templates get it as `reasoning_effort`."""
    summary: str | None = None
    """Repeated in the answer, which has the whole thought in any case."""


def _as_items(given: object) -> object:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class ResponsesRequest(SamplingFields):
    """Body of `/v1/responses`; null means absent."""

    place = Place.RESPONSE

    model: str | None = None
    input: Annotated[
        Items[InputItem],
        BeforeValidator(_as_items, json_schema_input_type=str | list[InputItem]),
    ]
    """A text stands for one message of the user."""
    instructions: str | None = None
    """The system message before all others."""
    max_output_tokens: UInt32 | None = None
    top_logprobs: UInt32 | None = None
    include: Items[str] | None = None
    text: ResponsesText | None = None
    reasoning: ResponsesReasoning | None = None
    thinking_token_budget: UInt32 | None = None
    """Not in OpenAI's: tokens after which the thought is closed."""
    tools: Items[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = (
        None
    )
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    """Repeated in the answer, like the three fields below."""
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    previous_response_id: str | None = None
    """Refused, like the three fields below: they need stored responses."""
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Not in OpenAI's: further variables for the template."""

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text has log probabilities beside it."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def check(self) -> None:
        """Refuse fields that need stored responses, and OpenAI's own tools; raises ValidationError or ToolError."""
        for name in ("previous_response_id", "conversation", "prompt"):
            if getattr(self, name) is not None:
                raise ValidationError(
                    f"`{name}` is not supported: nothing is stored here, so send everything as `input`"
                )
        if self.background:
            raise ValidationError(
                "`background` is not supported: nothing is stored here, so read the answer or a stream"
            )
        for tool in self.tools or ():
            tool.check()
