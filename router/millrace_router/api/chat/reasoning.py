"""The fields of OpenAI's routes about thoughts."""

from __future__ import annotations

from typing import Any

from millrace_router.api.body.fields import RequestModel, UInt32


class Reasoning(RequestModel):
    """How much the model is to think."""

    effort: str | None = None
    enabled: bool | None = None
    """OpenRouter's: false asks for no thought."""
    max_tokens: UInt32 | None = None
    """OpenRouter's name of `thinking_token_budget`, which beats it."""
    exclude: bool | None = None
    """OpenRouter's: whether the answer lacks the thought."""


class ReasoningFields(RequestModel):
    """Fields of chats; null means absent."""

    reasoning_effort: str | None = None
    """How much the model is to think: `none`, `minimal`, `low`, `medium`, `high` or what else its template knows."""
    reasoning: Reasoning | None = None
    """Another place of the effort, which `reasoning_effort` beats."""
    thinking_token_budget: UInt32 | None = None
    """Not in OpenAI's: tokens after which the thought is closed."""
    include_reasoning: bool | None = None
    """Not in OpenAI's: whether the answer has the thought; it has by default."""
    separate_reasoning: bool | None = None
    """SGLang's: false leaves the thought in the text as the model writes it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Not in OpenAI's: further variables for the template, such as `enable_thinking`."""

    @property
    def effort(self) -> str | None:
        """The effort, if there is one."""
        asked = self.reasoning or Reasoning()
        given = self.reasoning_effort or asked.effort
        return "none" if given is None and asked.enabled is False else given

    @property
    def thinking_budget(self) -> int | None:
        """Tokens after which the thought is closed."""
        other = None if self.reasoning is None else self.reasoning.max_tokens
        return other if self.thinking_token_budget is None else self.thinking_token_budget

    @property
    def shows_thought(self) -> bool:
        """Whether the answer has the thought."""
        excluded = self.reasoning is not None and self.reasoning.exclude
        return not excluded and self.include_reasoning is not False
