"""A chat in the form that all its dialects share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace_router.api.body.sampling import DEFAULT_OUTPUT, OutputOptions
from millrace_router.reasoning.reasoning_format import ReasoningFormat, Start
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.names import Names
from millrace_router.text.template_messages import Message, text_of
from millrace_router.text.tokenizer import Tokenizer
from millrace_router.tool_calls.parsing.call_format import CallFormat
from millrace_router.tool_calls.tool import Tool, ToolChoice

AUTO = ToolChoice("auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation whose next turn is to be generated."""

    request: GenerationRequest
    """Without a prompt; its grammar is for the text, not for calls of tools."""
    messages: Sequence[Message]
    """In the form that chat templates take: role, content, calls, call id, name, in this order."""
    num_choices: int = 1
    """Answers to generate."""
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = AUTO
    tool_prompt: str | None = None
    """TGI's: what follows the last message if there are tools; none does if the template lists them itself."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    template_variables: Mapping[str, Any] | None = None
    num_logprobs: int | None = None
    """Candidates that come with the log probability of each token; None for no log probabilities."""
    logprobs_name_ids: bool = False
    """Whether the log probabilities name tokens by their ids."""
    adds_special_tokens: bool = False
    """Whether the tokenizer puts its special tokens around the rendered prompt."""
    output_options: OutputOptions = DEFAULT_OUTPUT
    keeps_stops: bool = False
    """Whether stop strings stay in the text."""
    effort: str | None = None
    """How much the model is to think, in OpenAI's words; None leaves it to the template."""
    thinking_budget: int | None = None
    """Tokens after which a thought is closed."""
    splits_thought: bool = True
    """Whether thoughts are split from the text."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """A chat that may be generated, and what its answer is read with."""

    chat: Chat
    request: GenerationRequest
    """With the prompt, and the grammar of the whole answer."""
    tools: tuple[Tool, ...]
    """The tools that may be called; empty if none may."""
    tool_format: CallFormat
    reasoning: ReasoningFormat | None
    """How thoughts are split from the text; None if they are not."""
    start: Start
    tokenizer: Tokenizer
    names: Names
    """The ids of the answer."""

    @property
    def is_plain(self) -> bool:
        """Whether a token can become nothing but thought, text and calls."""
        return self.chat.num_logprobs is None and not self.chat.output_options.token_ids
