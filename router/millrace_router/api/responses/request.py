"""OpenAI's request for a response as a strict model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from millrace_router.api.body.fields import Items, Place, RequestModel, UInt32
from millrace_router.api.body.grammars import (
    JsonGrammar,
    LarkGrammar,
    RegexGrammar,
    TextFormat,
    raw_schema,
)
from millrace_router.api.chat.sampling import SamplingFields
from millrace_router.api.responses.input import (
    AdditionalToolsItem,
    ForeignItem,
    InputItem,
    LeftOutItem,
    ReasoningItem,
)
from millrace_router.api.responses.tools import (
    LeftOutTool,
    OfferedTool,
    ResponsesTool,
    left_out,
    offered,
)
from millrace_router.errors import ValidationError
from millrace_router.request.grammar import RawGrammar

LOGPROBS = "message.output_text.logprobs"
"""The name in `include` that asks for log probabilities."""


class ResponsesNamedTool(RequestModel):
    """A tool by its name."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class ResponsesAllowedTools(RequestModel):
    """The tools that the model may call in this turn."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Items[ResponsesNamedTool | LeftOutTool] = Field(min_length=1)
    """Those that are left out may not be called in any case."""


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
    verbosity: str | None = None
    """The model is not told."""


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
    tool_choice: (
        Literal["none", "auto", "required"] | ResponsesNamedTool | ResponsesAllowedTools | None
    ) = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    """Repeated in the answer, like the three fields below."""
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    previous_response_id: str | None = None
    """Repeated; the store has put the conversation in front of `input`."""
    store: bool | None = None
    """False asks for no memory of the response, which there is only with `--responses-store`."""
    conversation: str | dict[str, Any] | None = None
    """Refused, like the two fields below: OpenAI's servers store what they refer to."""
    prompt: dict[str, Any] | None = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Not in OpenAI's: further variables for the template."""

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text has log probabilities beside it."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def all_tools(self) -> list[ResponsesTool]:
        """The tools, those in items of the input among them."""
        added = [item.tools for item in self.input if isinstance(item, AdditionalToolsItem)]
        return list(chain(self.tools or (), *added))

    @property
    def offered(self) -> list[OfferedTool]:
        """The tools that the model may call."""
        return list(offered(self.all_tools))

    def check(self) -> None:
        """Refuse what is not supported and would change the answer; raises ValidationError."""
        for name in ("conversation", "prompt"):
            if getattr(self, name) is not None:
                raise ValidationError(
                    f"`{name}` is not supported: send everything as `input`, or refer to a stored response "
                    "by `previous_response_id`"
                )
        if self.background:
            raise ValidationError(
                "`background` is not supported: read the answer, or a stream of its events"
            )
        for item in self.input:
            if isinstance(item, ForeignItem):
                raise ValidationError(
                    f"`input` has an item of type `{item.type[:40]}`, which is not supported"
                )

    def left_out(self) -> Iterator[str]:
        """Yield names of the parts that the prompt does not have."""
        yield from left_out(self.all_tools)
        if self.text is not None and self.text.verbosity not in {None, "medium"}:
            yield "text.verbosity"
        for item in self.input:
            if isinstance(item, LeftOutItem):
                yield f"input.{item.type}"
            elif isinstance(item, ReasoningItem) and item.encrypted_content and not item.text:
                yield "input.reasoning"
