"""The start of a chat: its prompt and its grammar, and the generations of its choices."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

from aiohttp import web

from millrace_router.api.body.messages import EXCLUSIVE
from millrace_router.api.chat.chat import Chat, PreparedChat
from millrace_router.api.chat.choice import ReadChoice, read_choice
from millrace_router.engine.generation import Generation
from millrace_router.errors import TemplateError, ToolError, ValidationError, quoted
from millrace_router.reasoning.reasoning_format import ReasoningFormat, Start, ThoughtLimit
from millrace_router.request.adapter import AdapterReference
from millrace_router.request.grammar import RawGrammar
from millrace_router.request.images import PreparedImage
from millrace_router.request.names import Names
from millrace_router.request.request import Grammar, GrammarKind, SchedulingParameters
from millrace_router.request.scheduling import DEFAULT_SCHEDULING
from millrace_router.server.access_log import watch
from millrace_router.server.headers import ANSWER, names_of, note_max_tokens
from millrace_router.server.services import SERVICES, Services, scheduling_of
from millrace_router.text.chat_template import ChatTemplate
from millrace_router.text.template_messages import (
    ROLES,
    Message,
    num_images,
    text_of,
    without_sources,
)
from millrace_router.tool_calls.parsing.call_format import chat_grammar, has_grammar
from millrace_router.tool_calls.tool import Tool, ToolChoice
from millrace_router.tool_calls.tool_prompt import with_tool_prompt

SYSTEM = {"developer": "system"}


def folded(messages: Sequence[Message]) -> Sequence[Message]:
    """Return `messages` with one system turn, the first, that has the texts of all, a blank line apart.

    The roles `system` and `developer` count as one. Messages without a later system turn are returned as they are.
    """
    systems = [message for message in messages if _role_of(message) == "system"]
    if not systems or (len(systems) == 1 and messages[0] is systems[0]):
        return messages
    text = "\n\n".join(text_of(message["content"]) for message in systems)
    others = [message for message in messages if _role_of(message) != "system"]
    return [{"role": systems[0]["role"], "content": text}, *others]


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


def without_system(messages: Sequence[Message]) -> list[Message]:
    """Return `messages` with the texts of system turns before the first user's, for templates without such a role.

    The roles `system` and `developer` count as one. Without a user's turn the texts are one.
    """
    texts = [text_of(turn["content"]) for turn in messages if _role_of(turn) == "system"]
    others = [turn for turn in messages if _role_of(turn) != "system"]
    first = next((index for index, turn in enumerate(others) if turn["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": "\n\n".join(texts)}, *others]
    own = text_of(others[first]["content"])
    others[first] = {**others[first], "content": "\n\n".join([*texts, own])}
    return others


def _kind_of(message: Message) -> tuple[str, bool]:
    return _role_of(message), message.keys() == {"role", "content"}


def _role_of(message: Message) -> str:
    role: str = message["role"]
    return SYSTEM.get(role, role)


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
    index: int = 0,
) -> AsyncIterator[ChatRun]:
    """Generate the choices of a chat for the length of the block, and note them in the access log.

    `priority` is the body's; `index` is the chat's, of several in one request.

    Raises:
        RouterError: the chat or a header is not valid, or the server does not take the request.

    """
    services = request.app[SERVICES]
    scheduling = scheduling_of(request, priority)
    names = names_of(request).part(index)
    chat = replace(chat, request=replace(chat.request, answer=request.get(ANSWER)))
    async with run_chat(services, chat, adapter=adapter, scheduling=scheduling, names=names) as run:
        watch(request, *run.generations)
        most, wanted = run.generations[0].valid.max_new_tokens, chat.request.max_new_tokens
        if wanted is not None and most < wanted:
            note_max_tokens(request, most)
        yield run


@asynccontextmanager
async def run_chat(
    services: Services,
    chat: Chat,
    *,
    adapter: AdapterReference | None,
    scheduling: SchedulingParameters = DEFAULT_SCHEDULING,
    names: Names | None = None,
) -> AsyncIterator[ChatRun]:
    """Generate as `start_chat` does, for callers without an HTTP request; raises RouterError."""
    async with services.infer.permit(chat.num_choices):
        prepared = await prepare_chat(
            services, chat, adapter=adapter, scheduling=scheduling, names=names
        )
    generations = await services.infer.start_samples(prepared.request, chat.num_choices)
    with ExitStack() as cleanup:
        for generation in generations:
            cleanup.callback(generation.close)
        yield ChatRun(services, prepared, generations)


async def count_chat(services: Services, chat: Chat) -> int:
    """Count the tokens of the prompt of a chat; raises RouterError."""
    async with services.infer.turn_aside():
        prepared = await prepare_chat(services, chat)
        return await services.validator.count(prepared.request)


async def prepare_chat(
    services: Services,
    chat: Chat,
    *,
    adapter: AdapterReference | None = None,
    scheduling: SchedulingParameters = DEFAULT_SCHEDULING,
    names: Names | None = None,
) -> PreparedChat:
    """Make the prompt and the grammar of a chat; `names` are new without any. Raises RouterError."""
    names = names or Names.new()
    tools = () if chat.choice.kind == "none" else chat.tools
    grammar, bad_words, shown = chat.request.grammar, chat.request.bad_words, tools
    if tools:
        grammar = await _with_tools(services, tools, chat.choice, grammar)
    if chat.choice.kind == "none" and _shows_unused_tools(services):
        # Other turns of the same conversation may call them, and share the prefix.
        shown = chat.tools
        bad_words += services.tool_format.openers
    chat, images = await _with_images(services, chat)
    rendered = await _render(services, chat, shown, now=names.created)
    prompt = services.images.expanded(rendered, images)
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
            images=images,
            answer_text=partial(_answer_text, reasoning, start)
            if reasoning is not None and chat.splits_thought and chat.request.stop
            else None,
            is_chat=True,
            bad_words=bad_words,
            adds_special_tokens=chat.adds_special_tokens,
            grammar=grammar,
            adapter=adapter,
            scheduling=scheduling,
            unset_seed=names.seed(),
        ),
        tools=tools,
        tool_format=services.tool_format,
        reasoning=reasoning if chat.splits_thought else None,
        start=start,
        tokenizer=services.tokenizer,
        names=names,
    )


async def _with_images(services: Services, chat: Chat) -> tuple[Chat, tuple[PreparedImage, ...]]:
    """Prepare the pictures of a chat; it lives as long as its answer, and has their large sources no more."""
    messages, sources = without_sources(chat.messages)
    if not sources:
        return chat, ()
    images = await services.images.prepare(sources, chat.request.cache_salt)
    return replace(chat, messages=messages), images


def _answer_text(reasoning: ReasoningFormat, start: Start) -> Callable[[str], str]:
    """Return what finds the answer in the text of a generation, for its stop strings."""
    splitter = reasoning.splitter(start)
    return lambda text: splitter.push(text).answer


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
        grammar = await services.validator.make_grammar(grammar.read)
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
    make_grammar = services.validator.make_grammar
    if answer is not None and choice.is_forced:
        raise ToolError(EXCLUSIVE)
    if isinstance(answer, RawGrammar):
        answer = await make_grammar(answer.read)
    if answer is None and not has_grammar(tools, choice):
        return None
    if answer is not None and answer.kind is not GrammarKind.JSON_SCHEMA:
        return answer
    return await make_grammar(partial(chat_grammar, services.tool_format, tools, choice, answer))


async def _render(services: Services, chat: Chat, tools: Sequence[Tool], *, now: float) -> str:
    """Return the prompt that a chat becomes; raises RouterError."""
    template, messages = services.template, chat.messages
    if not services.dialect.takes_all_roles:
        _check_roles(template, messages)
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
        tools=[tool.as_json() for tool in tools] or None,
        variables=_variables(services, chat),
        now=now,
    )
    try:
        return await render(messages, continue_final_message=chat.continue_final_message)
    except TemplateError:
        fewer, continues = folded(messages), chat.continue_final_message
        if fewer[-1] is not messages[-1] and not chat.add_generation_prompt:
            # An assistant's turn that is the last only now is not continued.
            continues = bool(continues)
        fewest = joined(fewer)
        attempts = [] if fewer is messages else [fewer]
        attempts += [fewest] if len(fewest) < len(fewer) else []
        if _role_of(fewer[0]) == "system":
            attempts.append(without_system(fewest))
        for attempt in attempts:
            if num_images(attempt) < num_images(messages):
                continue
            with suppress(TemplateError):
                return await render(attempt, continue_final_message=continues)
        raise


def _shows_unused_tools(services: Services) -> bool:
    return services.template.lists_tools and not services.dialect.hides_unused_tools


def _check_roles(template: ChatTemplate, messages: Sequence[Message]) -> None:
    """Raise ValidationError for a role that is not a client's, and that the template does not name either."""
    for index, message in enumerate(messages):
        role: str = message["role"]
        if not template.has_role(role):
            known = ", ".join(f"`{one}`" for one in sorted(ROLES))
            raise ValidationError(
                f"`messages[{index}].role` must be one of {known}. Given: {quoted(role)}"
            )


def _variables(services: Services, chat: Chat) -> Mapping[str, Any] | None:
    """Return the variables of the template; the client's own take precedence over the variables of its effort."""
    if chat.effort is None:
        return chat.template_variables
    effort, reasoning = chat.effort, services.reasoning
    variables = {"reasoning_effort": effort} if reasoning is None else reasoning.variables(effort)
    return {**variables, **(chat.template_variables or {})}
