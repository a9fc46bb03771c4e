"""Renders messages as a prompt. Templates come from model repositories, so they run in a sandbox."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
import orjson
from jinja2 import TemplateError as JinjaError
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from millrace_router.errors import TemplateError
from millrace_router.text.control_tokens import ControlTokens
from millrace_router.text.model_files import ModelFiles
from millrace_router.text.template_messages import (
    ROLES,
    Message,
    TemplateShape,
    lacks_content,
    messages_for,
)

_MAX_INDENTED_CHARS = 8_000_000
"""Limit for indented JSON, since indentation makes a deeply nested list a hundred times as long."""


class _EndlessTemplate(TemplateError):  # noqa: N818
    """A template has made more turns than it may."""


class _Budget(threading.local):
    """The turns and the time that are left to the rendering in this thread."""

    turns = math.inf
    deadline = math.inf


_budget = _Budget()


@contextmanager
def _limited(turns: int, seconds: float) -> Iterator[None]:
    """Bound the rendering within: turns of loops and calls of macros together, and its time."""
    _budget.turns, _budget.deadline = turns, time.monotonic() + seconds
    try:
        yield
    finally:
        _budget.turns = _budget.deadline = math.inf


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates end: `_count_turns` has loops and macros call `counted` and `turn`."""

    intercepted_binops = frozenset({"*", "**"})

    def turn(self) -> None:
        """Count a turn; raises _EndlessTemplate."""
        _budget.turns -= 1
        if _budget.turns < 0 or time.monotonic() > _budget.deadline:
            raise _EndlessTemplate("the chat template does not come to an end")

    def counted(self, values: Any) -> _Counted:  # noqa: ANN401
        """Return the values of a loop, each of which is a turn."""
        return _Counted(self, values)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        """Multiply, unless the result is larger than any prompt."""
        size = _size_of_product(operator, left, right)
        if size > _MAX_INDENTED_CHARS:
            raise JinjaError(f"the result of `{operator}` is too large")
        return super().call_binop(context, operator, left, right)


@dataclass(frozen=True, slots=True)
class _Counted:
    """Values that count turns; with a length if they have one, as `loop.length` needs."""

    environment: _Environment
    values: Any

    def __iter__(self) -> Iterator[Any]:
        turn = self.environment.turn
        for value in self.values:
            turn()
            yield value

    def __len__(self) -> int:
        return len(self.values)


def _size_of_product(operator: str, left: object, right: object) -> float:
    """Characters, elements or bits of a product or power; 0 for other types."""
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * right if operator == "**" else 0
    if operator == "*" and isinstance(left, str | list | tuple) and isinstance(right, int):
        return len(left) * right
    if operator == "*" and isinstance(right, str | list | tuple) and isinstance(left, int):
        return len(right) * left
    return 0


def _count_turns(tree: nodes.Template) -> None:
    """Have every turn of a loop, also one that its condition leaves out, and every call of a macro counted."""

    def call(name: str, *arguments: nodes.Expr, lineno: int) -> nodes.Call:
        attribute = nodes.EnvironmentAttribute(name, lineno=lineno)
        return nodes.Call(attribute, list(arguments), [], None, None, lineno=lineno)

    loops = list(tree.find_all(nodes.For))
    for loop in loops:
        loop.iter = call("counted", cast("nodes.Expr", loop.iter), lineno=loop.lineno)
    bodies: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
        *(loop for loop in loops if loop.recursive),
        *tree.find_all(nodes.Macro),
        *tree.find_all(nodes.CallBlock),
    ]
    for block in bodies:
        line = block.lineno
        block.body.insert(0, nodes.ExprStmt(call("turn", lineno=line), lineno=line))


def template_environment() -> ImmutableSandboxedEnvironment:
    """Make an environment as transformers does: whitespace rules, `tojson`, `raise_exception`, `strftime_now`."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTags, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTags(Extension):
    """Renders `{% generation %}` blocks, which mark assistant text for training, as plain text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  (templates pass it by position)
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
        return encoder.encode(value)
    pieces, num_chars = [], 0
    for piece in encoder.iterencode(value):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > _MAX_INDENTED_CHARS:
            raise JinjaError(f"more than {_MAX_INDENTED_CHARS} characters of indented JSON")
    return "".join(pieces)


def _raise_exception(message: str) -> NoReturn:
    raise JinjaError(message)


def _strftime_now(pattern: str, now: float | None = None) -> str:
    # Templates show local time as the user's date, as in transformers.
    moment = datetime.now() if now is None else datetime.fromtimestamp(now)
    return moment.astimezone().strftime(pattern)


_END_MARK = "\ue0f1\ue0f2\ue0f1"
"""Private-use characters that mark the end of a message that the model continues."""
_LARGE_PROMPT_CHARS = 16_384
_RENDER_SECONDS = 30.0
_MAX_TURNS = 10_000_000
_TURNS_ON_LOOP = 20_000
"""Turns after which a rendering leaves the event loop for a thread; a large prompt begins there."""
_SECONDS_ON_LOOP = 0.1

MAX_RENDERS = 2
"""Large prompts that are rendered at a time: each thread that computes makes the event loop wait for its turn."""

_NO_SHAPE = TemplateShape()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chat:
    """The variables of a template."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any]
    """The client's own."""
    own: Mapping[str, Any]
    """The template's, which take precedence."""
    end: Callable[[str], str] = str
    """Cuts off what follows the last message if the model continues it."""
    continues: bool = False


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A template, or the reason why there is none."""

    template: jinja2.Template | None = None
    shape: TemplateShape = _NO_SHAPE
    fault: str = "template not found"

    @classmethod
    def of(cls, source: str | None) -> _Compiled:
        if source is None:
            return cls()
        environment = template_environment()
        try:
            tree = environment.parse(source)
            shape = TemplateShape.of(tree, source)
            _count_turns(tree)
            return cls(environment.from_string(tree), shape)
        # The compiler may raise anything; a bad template makes chats fail, and nothing else.
        except Exception as error:  # noqa: BLE001
            return cls(fault=f"the model's chat template is not valid: {error}")

    def render(self, chat: _Chat, control: ControlTokens | None) -> str:
        """Render; texts of `control` in the client's values stay texts. Raises TemplateError.

        Some templates accept only one of None and "" as the content of a message with only calls, so both are tried.
        """
        stand_ins = [None, ""] if self.shape.tests_for_none else ["", None]
        if not any(map(lacks_content, chat.messages)):
            del stand_ins[1]
        errors = []
        for stand_in in stand_ins:
            try:
                return self._render(chat, control, stand_in)
            except _EndlessTemplate:
                raise
            except TemplateError as error:
                errors.append(error)
        raise errors[0]

    def _render(self, chat: _Chat, control: ControlTokens | None, no_content: str | None) -> str:
        if self.template is None:
            raise TemplateError(self.fault)
        template = self.template

        def render(values: Mapping[str, Any]) -> str:
            own = {**chat.own, "tools": values["tools"], "messages": values["messages"]}
            return chat.end(template.render({**values["variables"], **own}))

        try:
            picture = "" if control is None else control.picture
            made = messages_for(self.shape, chat.messages, no_content=no_content, picture=picture)
            values = {
                "variables": chat.variables,
                "tools": chat.tools,
                "messages": _marked(made) if chat.continues else made,
            }
            return render(values) if control is None else control.guarded(values, render)
        except TemplateError:
            raise
        # A template is a program of its model's authors and may raise anything.
        except Exception as error:
            raise TemplateError(str(error) or type(error).__name__) from error


class ChatTemplate:
    """A compiled template with the model's special tokens; without a source, rendering fails."""

    def __init__(
        self,
        source: str | None,
        *,
        special_tokens: Mapping[str, str],
        tool_source: str | None = None,
        control_tokens: ControlTokens | None = None,
    ) -> None:
        """`tool_source` is the template for chats with tools, if the model has a separate one.

        With `control_tokens`, these texts are control tokens only where the template has them, and not in messages.
        """
        self.control_tokens = control_tokens
        self.special_tokens = dict(special_tokens)
        """Texts by name, such as `eos_token`."""
        self.source = source
        self._plain = _Compiled.of(source)
        self._with_tools = self._plain if tool_source is None else _Compiled.of(tool_source)
        self._threads = ThreadPoolExecutor(MAX_RENDERS, thread_name_prefix="render")
        self.tool_source = source if tool_source is None else tool_source
        """Source of the template for chats with tools."""

    @classmethod
    def of(cls, files: ModelFiles, *, control_tokens: ControlTokens | None = None) -> ChatTemplate:
        """Compile the templates of a model folder; `control_tokens` as in `__init__`."""
        return cls(
            files.chat_template,
            special_tokens=files.special_tokens,
            tool_source=files.tool_template,
            control_tokens=control_tokens,
        )

    @property
    def lists_tools(self) -> bool:
        """Whether the template renders tools; otherwise the messages must."""
        return self._with_tools.shape.names_tools

    def has_role(self, role: str) -> bool:
        """Whether a message may have this role: one that all templates get, or one that this template names."""
        return role in ROLES or role in self._plain.shape.texts | self._with_tools.shape.texts

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        now: float | None = None,
    ) -> str:
        """Return the prompt of `messages` in the form that `messages_for` describes.

        Without either option, an assistant's last message is continued: the prompt ends after its text without blanks,
        as in TGI. With `continue_final_message` the template's blanks are kept, as in transformers. `variables` are
        further variables of the template; the template's own take precedence. `now`, in Unix seconds, is the time that
        it shows; None for the clock's.

        Raises:
            TemplateError: the template is missing, is not valid, or it fails for these messages.

        """
        chosen = self._with_tools if tools else self._plain
        if continue_final_message and add_generation_prompt:
            raise TemplateError("a continued message must not be followed by a generation prompt")
        is_implied = add_generation_prompt is None and continue_final_message is None
        continues = _is_open(messages) if is_implied else bool(continue_final_message)
        own: dict[str, Any] = {
            **self.special_tokens,
            "add_generation_prompt": not continues and add_generation_prompt is not False,
        }
        if now is not None:
            own["strftime_now"] = functools.partial(_strftime_now, now=now)
        chat = _Chat(messages=messages, tools=tools, variables=variables or {}, own=own)
        if continues:
            end = _up_to_mark if is_implied else _up_to_mark_exactly
            chat = replace(chat, end=end, continues=True)
        return chosen.render(chat, self.control_tokens)

    async def render_async(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        now: float | None = None,
    ) -> str:
        """Do as `render`; large prompts and long loops are rendered in a thread, for a bounded time."""
        render = functools.partial(
            self.render,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables=variables,
            now=now,
        )
        if _is_small([messages, tools, variables]):
            try:
                with _limited(_TURNS_ON_LOOP, _SECONDS_ON_LOOP):
                    return render()
            except _EndlessTemplate:
                pass
        try:
            async with asyncio.timeout(_RENDER_SECONDS):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, _render_limited, render)
        except TimeoutError as error:
            raise TemplateError(f"rendering took more than {_RENDER_SECONDS:g} s") from error


def _render_limited(render: Callable[[], str]) -> str:
    """Render in a thread, which ends also when the request has been given up."""
    with _limited(_MAX_TURNS, _RENDER_SECONDS):
        return render()


def _is_small(values: object) -> bool:
    """Return whether rendering is so quick that it needs no thread."""
    try:
        return len(orjson.dumps(values)) < _LARGE_PROMPT_CHARS
    except orjson.JSONEncodeError:
        # The values are nested too deeply for orjson.
        return False


def _is_open(messages: Sequence[Message]) -> bool:
    """Return whether the last message is continued by TGI's rule."""
    if not messages or messages[-1].get("role") != "assistant":
        return False
    return messages[-1].get("content") is not None and not messages[-1].get("tool_calls")


def _marked(messages: list[Message]) -> list[Message]:
    """Messages with a mark at the end of the last one, and a blank that shows whether the template trims it."""
    if not messages or messages[-1]["content"] is None or "tool_calls" in messages[-1]:
        raise TemplateError("the last message does not end with text that could be continued")
    content = messages[-1]["content"]
    if isinstance(content, str):
        content += f"{_END_MARK} "
    else:
        *others, last = content or [{"type": "text", "text": ""}]
        content = [*others, {**last, "text": f"{last['text']}{_END_MARK} "}]
    return [*messages[:-1], {**messages[-1], "content": content}]


def _up_to_mark(prompt: str) -> str:
    """The prompt up to the mark without blanks; the whole prompt if the template dropped the message, as in TGI."""
    before, mark, _ = prompt.rpartition(_END_MARK)
    return _without_marks(before).rstrip() if mark else prompt


def _up_to_mark_exactly(prompt: str) -> str:
    """Return the prompt up to the mark with the blanks that the template keeps, as in transformers."""
    before, mark, after = prompt.rpartition(_END_MARK)
    if not mark:
        raise TemplateError("the chat template leaves out the message that is to be continued")
    before = _without_marks(before)
    return before if after.startswith(" ") else before.rstrip()


def _without_marks(prompt: str) -> str:
    """Remove every mark, since templates may write a message more than once."""
    return prompt.replace(f"{_END_MARK} ", "").replace(_END_MARK, "")
