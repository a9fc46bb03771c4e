"""From a chat request to what is generated, and back: what all faces of chat have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from millrace_router.api.openai.chat_request import ChatCompletionRequest
from millrace_router.api.openai.choice import ChoiceText, TokenLogprobs
from millrace_router.errors import ToolError
from millrace_router.request.events import Token
from millrace_router.request.grammar import GrammarType, grammar_type
from millrace_router.request.parameters import GenerateRequest
from millrace_router.request.request import GrammarKind
from millrace_router.server.services import Services
from millrace_router.text.tokenizer import Tokenizer
from millrace_router.tool_calls.call_format import has_grammar
from millrace_router.tool_calls.grammar import chat_grammar
from millrace_router.tool_calls.tool import Tool, ToolChoice
from millrace_router.tool_calls.tool_format import ToolFormat
from millrace_router.tool_calls.tool_prompt import DEFAULT_TOOL_PROMPT, with_tool_prompt

EXCLUSIVE = "Grammar and tools are mutually exclusive"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """A chat that may be generated: its prompt and parameters, and how its answer is read."""

    asked: GenerateRequest
    tools: tuple[Tool, ...]
    """Those that may be called; empty if none may."""
    choice: ToolChoice
    tool_format: ToolFormat
    logprobs: TokenLogprobs | None
    keeps_stops: bool

    @property
    def is_plain(self) -> bool:
        """Whether a token can become nothing but text."""
        return self.logprobs is None and not self.tools

    def text(self) -> ChoiceText:
        """Return a new reader of one choice."""
        return ChoiceText(
            self.asked.parameters.stop,
            logprobs=self.logprobs,
            parser=self.tool_format.parser(self.tools, self.choice) if self.tools else None,
            markers=sorted(self.tool_format.markers) if self.tools else (),
            keeps_stops=self.keeps_stops,
        )


async def prepare_chat(services: Services, body: ChatCompletionRequest) -> PreparedChat:
    """Check a chat, and make a prompt of it; raises RouterError."""
    body.check(services.limits)
    strict_tgi = services.config.strict_tgi
    parameters = body.parameters(strict_tgi=strict_tgi)
    if strict_tgi and body.tools is not None and parameters.grammar is not None:
        raise ToolError(EXCLUSIVE)
    tools, choice = body.tool_use()
    if choice.kind == "none":
        tools = ()
    if tools:
        grammar = await _grammar(services, tools, choice, parameters.grammar)
        parameters = parameters.model_copy(update={"grammar": grammar})
    prompt = await _render(services, body, tools)
    return PreparedChat(
        asked=GenerateRequest(inputs=prompt, parameters=parameters),
        tools=tools,
        choice=choice,
        tool_format=services.tool_format,
        logprobs=_logprobs(services.tokenizer, body),
        keeps_stops=strict_tgi,
    )


async def _grammar(
    services: Services,
    tools: tuple[Tool, ...],
    choice: ToolChoice,
    answer: GrammarType | None,
) -> GrammarType | None:
    """What a model with tools may say, `answer` being what the client has asked for; raises RouterError."""
    in_thread = services.tokenizer.in_thread
    described = None
    if answer is not None:
        if choice.is_forced:
            raise ToolError(EXCLUSIVE)
        described = await in_thread(answer.resolved)
        if described.kind is not GrammarKind.JSON_SCHEMA:
            return answer
    elif not has_grammar(tools, choice):
        return None
    grammar = await in_thread(lambda: chat_grammar(services.tool_format, tools, choice, described))
    return None if grammar is None else grammar_type(grammar)


async def _render(services: Services, body: ChatCompletionRequest, tools: tuple[Tool, ...]) -> str:
    """The prompt that a chat becomes; raises RouterError."""
    template = services.template
    images = services.config.strict_tgi
    messages = [message.for_template(images=images) for message in body.messages]
    if tools and (body.tool_prompt or not template.lists_tools):
        messages = with_tool_prompt(
            messages,
            tools,
            body.tool_prompt or DEFAULT_TOOL_PROMPT,
            lists_tools=template.lists_tools,
        )
    return await template.render_async(
        messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=[tool.as_json() for tool in tools] or None,
        variables=body.chat_template_kwargs,
    )


def _logprobs(tokenizer: Tokenizer, body: ChatCompletionRequest) -> TokenLogprobs | None:
    if not body.logprobs:
        return None
    return TokenLogprobs(
        num_candidates=body.top_logprobs or 0, bytes_of=partial(_bytes_of, tokenizer)
    )


def _bytes_of(tokenizer: Tokenizer, token: Token) -> bytes:
    if tokenizer.has_pieces and not token.special:
        return tokenizer.token_bytes(token.id)
    return token.text.encode()
