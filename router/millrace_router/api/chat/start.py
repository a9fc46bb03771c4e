"""The start of a chat: its prompt and its grammar, and the generations of its choices."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

from aiohttp import web

from millrace_router.api.body.messages import EXCLUSIVE
from millrace_router.api.chat.chat import Chat, PreparedChat
from millrace_router.api.chat.choice import ReadChoice, read_choice
from millrace_router.engine.generation import Generation
from millrace_router.errors import TemplateError, ToolError
from millrace_router.reasoning.reasoning_format import ReasoningFormat, Start, ThoughtLimit
from millrace_router.request.adapter import AdapterReference
from millrace_router.request.grammar import RawGrammar
from millrace_router.request.request import Grammar, GrammarKind, SchedulingParameters
from millrace_router.request.scheduling import DEFAULT_SCHEDULING
from millrace_router.server.access_log import watch
from millrace_router.server.services import SERVICES, Services, scheduling_of
from millrace_router.text.template_messages import Message, text_of
from millrace_router.tool_calls.parsing.call_format import chat_grammar, has_grammar
from millrace_router.tool_calls.tool import Tool, ToolChoice
from millrace_router.tool_calls.tool_prompt import with_tool_prompt

SYSTEM = {"developer": "system"}


def joined(messages: Sequence[Message]) -> list[Message]:
    """Return `messages` with a turn for each run of plain turns of one role, their texts a blank line apart.

    The roles `system` and `developer` count as one.
    """
    made: list[Message] = []
    for (_, is_plain), run in groupby(messages, key=_kind_of):
        turns = list(run)
        if not is_plain or len(turns) == 1:
            made += turns
            continue
        text = "\n\n".join(text_of(turn["content"]) for turn in turns)
        made.append({"role": turns[0]["role"], "content": text})
    return made


def _kind_of(message: Message) -> tuple[str, bool]:
    role: str = message["role"]
    return SYSTEM.get(role, role), message.keys() == {"role", "content"}


@dataclass(frozen=True, slots=True)
class ChatRun:
    """A chat that is being generated."""

    services: Services
    chat: PreparedChat
    generations: tuple[Generation, ...]
    """One for each choice."""

    async def read(self) -> list[ReadChoice]:
        """Read all choices to their ends; raises RouterError.

        They are read one after the other: tokens of the others wait in their streams.
        """
        return [await read_choice(generation, self.chat) for generation in self.generations]


@asynccontextmanager
async def start_chat(
    request: web.Request,
    chat: Chat,
    priority: int | None,
    adapter: AdapterReference | None,
) -> AsyncIterator[ChatRun]:
    """Generate the choices of a chat for the length of the block, and note them in the access log.

    `priority` is the body's.

    Raises:
        RouterError: the chat or a header is not valid, or the server does not take the request.

    """
    services = request.app[SERVICES]
    scheduling = scheduling_of(request, priority)
    async with run_chat(services, chat, adapter=adapter, scheduling=scheduling) as run:
        watch(request, *run.generations)
        yield run


@asynccontextmanager
async def run_chat(
    services: Services,
    chat: Chat,
    *,
    adapter: AdapterReference | None,
    scheduling: SchedulingParameters = DEFAULT_SCHEDULING,
) -> AsyncIterator[ChatRun]:
    """Generate as `start_chat` does, for callers without an HTTP request; raises RouterError."""
    prepared = await prepare_chat(services, chat, adapter=adapter, scheduling=scheduling)
    generations = await services.infer.start_samples(prepared.request, chat.num_choices)
    with ExitStack() as cleanup:
        for generation in generations:
            cleanup.callback(generation.close)
        yield ChatRun(services, prepared, generations)


async def prepare_chat(
    services: Services,
    chat: Chat,
    *,
    adapter: AdapterReference | None = None,
    scheduling: SchedulingParameters = DEFAULT_SCHEDULING,
) -> PreparedChat:
    """Make the prompt and the grammar of a chat; raises RouterError."""
    tools = () if chat.choice.kind == "none" else chat.tools
    grammar = chat.request.grammar
    if tools:
        grammar = await _with_tools(services, tools, chat.choice, grammar)
    prompt = await _render(services, chat, tools)
    reasoning = services.reasoning
    start = Start.FREE
    if reasoning is not None:
        start = reasoning.start_of(prompt, chat.continued)
        grammar = await _behind_thought(services, reasoning, start, chat, grammar)
    return PreparedChat(
        chat=chat,
        request=replace(
            chat.request,
            prompt=prompt,
            adds_special_tokens=chat.adds_special_tokens,
            grammar=grammar,
            adapter=adapter,
            scheduling=scheduling,
        ),
        tools=tools,
        tool_format=services.tool_format,
        reasoning=reasoning if chat.splits_thought else None,
        start=start,
        tokenizer=services.tokenizer,
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
    """Return the variables of the template; the client's own take precedence over the variables of its effort."""
    if chat.effort is None:
        return chat.template_variables
    effort, reasoning = chat.effort, services.reasoning
    variables = {"reasoning_effort": effort} if reasoning is None else reasoning.variables(effort)
    return {**variables, **(chat.template_variables or {})}
