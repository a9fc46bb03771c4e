"""OpenAI's chat request as a strict model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import Field, model_validator

from millrace_router.api.body.fields import Items, Place, UInt32
from millrace_router.api.chat.chat import Chat, check_exclusive
from millrace_router.api.chat.messages import ChatMessage
from millrace_router.api.chat.reasoning import ReasoningFields
from millrace_router.api.chat.sampling import TOP_LOGPROBS
from millrace_router.api.chat.tools import (
    ToolChoiceField,
    ToolDefinition,
    choose,
    without_functions,
)
from millrace_router.api.openai.common_request import CommonRequest
from millrace_router.errors import ValidationError
from millrace_router.request.dialect import Dialect
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.limits import Limits

OLD_CLIENTS_FIELDS = frozenset(
    {"model", "messages", "repetition_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs"}
    | {"max_tokens", "n", "presence_penalty", "stream", "seed", "temperature", "top_p", "tools", "tool_choice"}
)  # fmt: skip
"""What TGI's old clients, `text-generation` and `tgi`, send with every chat, as null if need be."""


class ChatCompletionRequest(ReasoningFields, CommonRequest):
    """Body of `/v1/chat/completions` and `/chat_tokenize`."""

    place = Place.CHAT

    messages: Items[ChatMessage] = Field(min_length=1)
    max_completion_tokens: UInt32 | None = None
    """The newer name of `max_tokens`, which it beats."""
    logprobs: bool | None = None
    top_logprobs: UInt32 | None = None
    tools: Items[ToolDefinition] | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    tool_prompt: str | None = None
    """TGI's: what follows the last message if there are tools; none does if the template lists them itself."""
    add_generation_prompt: bool | None = None
    """Not in either contract: whether the prompt ends with the beginning of the assistant's turn."""
    continue_final_message: bool | None = None
    """Not in either contract: whether the last turn is continued. As in TGI it is if it is the assistant's."""
    documents: Items[dict[str, Any]] | None = None
    """vLLM's: a variable of the template."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_functions(cls, value: object) -> object:
        return without_functions(value, functions="tools", function_call="tool_choice")

    @property
    def is_of_old_client(self) -> bool:
        """Whether one of TGI's old clients sent it, which read chunks in a form of their own."""
        return self.model == "tgi" and self.model_fields_set >= OLD_CLIENTS_FIELDS

    def check(self, limits: Limits) -> None:
        """Check the fields that TGI ignores; raises RouterError."""
        super().check(limits)
        if self.continue_final_message and self.add_generation_prompt:
            raise ValidationError(
                "`continue_final_message` and `add_generation_prompt` are mutually exclusive"
            )

    def generation(self, dialect: Dialect) -> GenerationRequest:
        """Translate, without a prompt; raises ValidationError."""
        request = super().generation(dialect)
        if self.max_completion_tokens is not None:
            names = request.names
            if not dialect.has_tgi_errors:
                newer = "max_completion_tokens"
                names = replace(names, max_new_tokens=newer, most_tokens=newer)
            request = replace(request, max_new_tokens=self.max_completion_tokens, names=names)
        return replace(
            request,
            top_n_tokens=self.top_logprobs if self.logprobs else None,
            top_n_allowed=TOP_LOGPROBS,
        )

    def chat(self, limits: Limits) -> Chat:
        """Check, and translate; raises RouterError."""
        self.check(limits)
        dialect = limits.dialect
        request = self.generation(dialect)
        check_exclusive(self.tools, request, dialect)
        tools = tuple(tool.as_tool() for tool in self.tools or ())
        parallel = self.parallel_tool_calls is not False
        tools, choice = choose(tools, self.tool_choice, parallel=parallel)
        return Chat(
            request=request,
            messages=[message.for_template(dialect) for message in self.messages],
            tools=tools,
            choice=choice,
            tool_prompt=self.tool_prompt,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            template_variables=self._variables(),
            adds_special_tokens=bool(self.add_special_tokens),
            shown=self.shown,
            num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            logprobs_name_ids=bool(self.return_tokens_as_token_ids),
            keeps_stops=dialect.keeps_stops,
            effort=self.effort,
            thinking_budget=self.thinking_budget,
            splits_thought=self.separate_reasoning is not False,
            shows_thought=self.shows_thought,
        )

    def _variables(self) -> dict[str, Any] | None:
        if self.documents is None:
            return self.chat_template_kwargs
        return {"documents": self.documents, **(self.chat_template_kwargs or {})}
