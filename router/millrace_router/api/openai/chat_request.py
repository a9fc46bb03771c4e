"""OpenAI's chat request as a strict model."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from millrace_router.api.openai.chat_messages import ChatMessage
from millrace_router.api.openai.chat_tools import (
    ToolChoiceField,
    ToolDefinition,
    choose,
    without_functions,
)
from millrace_router.api.openai.common_request import CommonRequest, Items
from millrace_router.errors import ValidationError
from millrace_router.request.fields import UInt32
from millrace_router.request.limits import Limits
from millrace_router.request.parameters import OpenAIParameters
from millrace_router.tool_calls.tool import Tool, ToolChoice


class ChatCompletionRequest(CommonRequest):
    """Body of `/v1/chat/completions` and `/chat_tokenize`."""

    messages: Items[ChatMessage] = Field(min_length=1)
    max_completion_tokens: UInt32 | None = None
    logprobs: bool | None = None
    top_logprobs: UInt32 | None = None
    tools: Items[ToolDefinition] | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    tool_prompt: str | None = None
    """TGI's: what follows the last message if there are tools; none does if the template tells of them itself."""
    add_generation_prompt: bool | None = None
    """Not in either contract: whether the prompt ends with the beginning of the assistant's turn."""
    continue_final_message: bool | None = None
    """Not in either contract: whether the last turn is to be continued. As in TGI it is if it is the assistant's."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Not in either contract: further variables for the template, such as `enable_thinking`."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_functions(cls, value: object) -> object:
        return without_functions(value, functions="tools", function_call="tool_choice")

    def tool_use(self) -> tuple[tuple[Tool, ...], ToolChoice]:
        """Tools that the model may call, and the choice among them; raises ToolError."""
        tools = tuple(tool.as_tool() for tool in self.tools or ())
        return choose(tools, self.tool_choice, parallel=self.parallel_tool_calls is not False)

    def check(self, limits: Limits) -> None:
        """Check what only this route has; raises RouterError."""
        super().check(limits)
        if self.continue_final_message and self.add_generation_prompt:
            raise ValidationError(
                "`continue_final_message` and `add_generation_prompt` are mutually exclusive"
            )

    def parameters(
        self, *, top_n_tokens: int | None = None, strict_tgi: bool = False
    ) -> OpenAIParameters:
        """Translate; `max_completion_tokens` is the newer name of `max_tokens` and beats it."""
        parameters = super().parameters(
            top_n_tokens=self.top_logprobs if self.logprobs else top_n_tokens,
            strict_tgi=strict_tgi,
        )
        if self.max_completion_tokens is None:
            return parameters
        return parameters.model_copy(update={"max_new_tokens": self.max_completion_tokens})
