"""A chat in the form that all its dialects share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace_router.api.body.sampling import DEFAULT_TEXT, ShownText
from millrace_router.errors import ToolError
from millrace_router.request.dialect import Dialect
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.text.template_messages import Message, text_of
from millrace_router.tool_calls.tool import Tool, ToolChoice

AUTO = ToolChoice("auto")
EXCLUSIVE = "Grammar and tools are mutually exclusive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation whose next turn is to be generated."""

    request: GenerationRequest
    """Without a prompt; its grammar is that of the text, without calls of tools."""
    messages: Sequence[Message]
    """As the chat template takes them: role, content, calls, call id, name, in this order."""
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = AUTO
    tool_prompt: str | None = None
    """TGI's: what follows the last message if there are tools; none does if the template lists them itself."""
    joins_turns: bool = False
    """Whether turns of one role in a row become one where the template refuses them."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    template_variables: Mapping[str, Any] | None = None
    num_logprobs: int | None = None
    """Candidates beside the log probability of each token; None for no log probabilities."""
    logprobs_name_ids: bool = False
    """Whether they name tokens by their ids."""
    adds_special_tokens: bool = False
    """Whether the tokenizer puts its special tokens around the rendered prompt."""
    shown: ShownText = DEFAULT_TEXT
    keeps_stops: bool = False
    """Whether stop strings stay in the text."""
    effort: str | None = None
    """How much the model is to think, in OpenAI's words; None leaves it to the template."""
    thinking_budget: int | None = None
    """Tokens after which a thought is closed."""
    splits_thought: bool = True
    """Whether thoughts are told from the text."""
    shows_thought: bool = True

    @property
    def continued(self) -> str | None:
        """The text of the last message if the model is to go on with it."""
        if self.add_generation_prompt or self.continue_final_message is False:
            return None
        last = self.messages[-1]
        if last.get("role") != "assistant" or last.get("tool_calls"):
            return None
        return text_of(last.get("content"))


def check_exclusive(tools: object, request: GenerationRequest, dialect: Dialect) -> None:
    """Raise ToolError for tools beside a grammar if the dialect refuses them."""
    if dialect.refuses_tools_with_format and tools is not None and request.grammar is not None:
        raise ToolError(EXCLUSIVE)
