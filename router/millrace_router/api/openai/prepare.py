"""Makes the prompt and the grammar of a chat, and the reader of its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from millrace_router.api.chat.chat import EXCLUSIVE, Chat
from millrace_router.api.chat.shown import DEFAULT_TEXT, ShownText
from millrace_router.api.chat.turns import joined
from millrace_router.api.openai.choice import ChoiceText, TokenLogprobs
from millrace_router.errors import TemplateError, ToolError
from millrace_router.reasoning.reasoning_format import ReasoningFormat, Start, ThoughtLimit
from millrace_router.request.events import Token
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.grammar import RawGrammar
from millrace_router.request.request import Grammar, GrammarKind
from millrace_router.server.services import Services
from millrace_router.text.tokenizer import Tokenizer
from millrace_router.tool_calls.parsing.call_format import CallFormat, chat_grammar, has_grammar
from millrace_router.tool_calls.tool import Tool, ToolChoice
from millrace_router.tool_calls.tool_prompt import with_tool_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """A chat that may be generated, and how its answer is read."""

    request: GenerationRequest
    tools: tuple[Tool, ...]
    """The tools that may be called; empty if none may."""
    choice: ToolChoice
    tool_format: CallFormat
    logprobs: TokenLogprobs | None
    keeps_stops: bool
    reasoning: ReasoningFormat | None
    """How thoughts are told from the text; None if they are not."""
    start: Start
    shows_thought: bool
    shown: ShownText = DEFAULT_TEXT

    @property
    def is_plain(self) -> bool:
        """Whether a token can become nothing but thought, text and calls."""
        return self.logprobs is None and not self.shown.token_ids

    def text(self) -> ChoiceText:
        """Return a new reader of one choice."""
        return ChoiceText(
            self.request.stop,
            logprobs=self.logprobs,
            parser=self.tool_format.parser(self.tools, self.choice) if self.tools else None,
            markers=self._markers(),
            keeps_stops=self.keeps_stops,
            splitter=None
            if self.reasoning is None
            else self.reasoning.splitter(self.start, keeps_calls=bool(self.tools)),
            shows_thought=self.shows_thought,
            shown=self.shown,
        )

    def _markers(self) -> Sequence[str]:
        """Return the special tokens that the text has for its readers."""
        markers = set(self.tool_format.markers) if self.tools else set()
        return sorted(markers if self.reasoning is None else markers | self.reasoning.special)


async def prepare_chat(services: Services, chat: Chat) -> PreparedChat:
    """Make the prompt and the grammar of a chat; raises RouterError."""
    tools = () if chat.choice.kind == "none" else chat.tools
    grammar = chat.request.grammar
    if tools:
        grammar = await _with_tools(services, tools, chat.choice, grammar)
    prompt = await _render(services, chat, tools)
    found = services.reasoning
    start = Start.FREE if found is None else found.start_of(prompt, chat.continued)
    if found is not None:
        grammar = await _behind_thought(services, found, start, chat, grammar)
    reasoning = found if chat.splits_thought else None
    return PreparedChat(
        request=replace(
            chat.request,
            prompt=prompt,
            adds_special_tokens=chat.adds_special_tokens,
            grammar=grammar,
        ),
        tools=tools,
        choice=chat.choice,
        tool_format=services.tool_format,
        logprobs=_logprobs(services.tokenizer, chat),
        keeps_stops=chat.keeps_stops,
        reasoning=reasoning,
        start=start,
        shows_thought=chat.shows_thought,
        shown=chat.shown,
    )


async def _behind_thought(
    services: Services,
    reasoning: ReasoningFormat,
    start: Start,
    chat: Chat,
    grammar: RawGrammar | Grammar | None,
) -> RawGrammar | Grammar | None:
    """Return the grammar of an answer behind a thought; raises RouterError."""
    budget = chat.thinking_budget
    if budget is not None and budget >= services.limits.max_total_tokens:
        budget = None
    if grammar is None and budget is None:
        return None
    if isinstance(grammar, RawGrammar):
        grammar = await services.tokenizer.in_thread(grammar.read)
    limit = ThoughtLimit(budget=budget, ends=services.shard.eos_token_ids)
    has_calls = bool(chat.tools) and chat.choice.kind != "none"
    return reasoning.grammar(start, grammar, limit, is_text=not has_calls)


async def _with_tools(
    services: Services,
    tools: Sequence[Tool],
    choice: ToolChoice,
    answer: RawGrammar | Grammar | None,
) -> Grammar | None:
    """Return the grammar of calls and text, where `answer` is the grammar of the text; raises RouterError."""
    in_thread = services.tokenizer.in_thread
    if answer is not None and choice.is_forced:
        raise ToolError(EXCLUSIVE)
    if isinstance(answer, RawGrammar):
        answer = await in_thread(answer.read)
    if answer is None and not has_grammar(tools, choice):
        return None
    if answer is not None and answer.kind is not GrammarKind.JSON_SCHEMA:
        return answer
    return await in_thread(partial(chat_grammar, services.tool_format, tools, choice, answer))


async def _render(services: Services, chat: Chat, tools: Sequence[Tool]) -> str:
    """Return the prompt that a chat becomes; raises RouterError."""
    template, messages = services.template, chat.messages
    if tools and (chat.tool_prompt or not template.lists_tools):
        messages = with_tool_prompt(
            messages,
            tools,
            chat.tool_prompt or services.tool_format.tool_prompt,
            lists_tools=template.lists_tools,
        )
    render = partial(
        template.render_async,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        tools=[tool.as_json() for tool in tools] or None,
        variables=_variables(services, chat),
    )
    try:
        return await render(messages)
    except TemplateError:
        fewer = joined(messages) if chat.joins_turns else messages
        if len(fewer) == len(messages):
            raise
        return await render(fewer)


def _variables(services: Services, chat: Chat) -> Mapping[str, Any] | None:
    """Return the variables of the template; the client's own beat those of its effort."""
    if chat.effort is None:
        return chat.template_variables
    found = services.reasoning
    asked = {"reasoning_effort": chat.effort} if found is None else found.variables(chat.effort)
    return {**asked, **(chat.template_variables or {})}


def _logprobs(tokenizer: Tokenizer, chat: Chat) -> TokenLogprobs | None:
    if chat.num_logprobs is None:
        return None
    return TokenLogprobs(
        num_candidates=chat.num_logprobs,
        bytes_of=partial(_bytes_of, tokenizer),
        names_ids=chat.logprobs_name_ids,
    )


def _bytes_of(tokenizer: Tokenizer, token: Token) -> bytes:
    if tokenizer.has_token_bytes and not token.special:
        return tokenizer.token_bytes(token.id)
    return token.text.encode()
