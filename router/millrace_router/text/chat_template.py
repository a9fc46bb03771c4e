"""Renders messages as a prompt. Templates come from model repositories, so they run in a sandbox."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import orjson
from jinja2 import TemplateError as JinjaError
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from millrace_router.errors import TemplateError
from millrace_router.text.model_files import ModelFiles
from millrace_router.text.template_messages import (
    Message,
    TemplateShape,
    lacks_content,
    messages_for,
)

_MAX_INDENTED_CHARS = 8_000_000
"""Limit for indented JSON, since indentation makes a deeply nested list a hundred times as long."""


def template_environment() -> ImmutableSandboxedEnvironment:
    """Make an environment as transformers does: whitespace rules, `tojson`, `raise_exception`, `strftime_now`."""
    environment = ImmutableSandboxedEnvironment(
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


def _strftime_now(pattern: str) -> str:
    # Templates show local time as the user's date, as in transformers.
    return datetime.now().astimezone().strftime(pattern)


_END_MARK = "\ue0f1\ue0f2\ue0f1"
"""Private-use characters that mark the end of a message that the model continues."""
_LARGE_PROMPT_CHARS = 16_384
_RENDER_SECONDS = 30.0

_NO_SHAPE = TemplateShape()


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
            return cls(environment.from_string(tree), shape)
        # The compiler may raise anything; a bad template makes chats fail, and nothing else.
        except Exception as error:  # noqa: BLE001
            return cls(fault=f"the model's chat template is not valid: {error}")

    def render(
        self, messages: Sequence[Message], context: Mapping[str, Any], *, is_marked: bool
    ) -> str:
        """Render, with a mark at the end of the last message if `is_marked`; raises TemplateError.

        Some templates accept only one of None and "" as the content of a message with only calls, so both are tried.
        """
        stand_ins = [None, ""] if self.shape.tests_for_none else ["", None]
        if not any(map(lacks_content, messages)):
            del stand_ins[1]
        errors = []
        for stand_in in stand_ins:
            try:
                return self._render(messages, context, stand_in, is_marked=is_marked)
            except TemplateError as error:
                errors.append(error)
        raise errors[0]

    def _render(
        self,
        messages: Sequence[Message],
        context: Mapping[str, Any],
        no_content: str | None,
        *,
        is_marked: bool,
    ) -> str:
        if self.template is None:
            raise TemplateError(self.fault)
        try:
            made = messages_for(self.shape, messages, no_content=no_content)
            return self.template.render(
                {**context, "messages": _marked(made) if is_marked else made}
            )
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
    ) -> None:
        """`tool_source` is the template for chats with tools, if the model has a separate one."""
        self.special_tokens = dict(special_tokens)
        """Texts by name, such as `eos_token`."""
        self.source = source
        self._plain = _Compiled.of(source)
        self._with_tools = self._plain if tool_source is None else _Compiled.of(tool_source)
        self.tool_source = source if tool_source is None else tool_source
        """Source of the template for chats with tools."""

    @classmethod
    def of(cls, files: ModelFiles) -> ChatTemplate:
        """Compile the templates of a model folder."""
        return cls(
            files.chat_template,
            special_tokens=files.special_tokens,
            tool_source=files.tool_template,
        )

    @property
    def lists_tools(self) -> bool:
        """Whether the template renders tools; otherwise the messages must."""
        return self._with_tools.shape.names_tools

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of `messages` in the form that `messages_for` describes.

        Without either option, an assistant's last message is continued: the prompt ends after its text without blanks,
        as in TGI. With `continue_final_message` the template's blanks are kept, as in transformers. `variables` are
        further variables of the template; the template's own take precedence.

        Raises:
            TemplateError: the template is missing, is not valid, or it fails for these messages.

        """
        chosen = self._with_tools if tools else self._plain
        if continue_final_message and add_generation_prompt:
            raise TemplateError("a continued message must not be followed by a generation prompt")
        is_implied = add_generation_prompt is None and continue_final_message is None
        continues = _is_open(messages) if is_implied else bool(continue_final_message)
        context = {
            **(variables or {}),
            **self.special_tokens,
            "add_generation_prompt": not continues and add_generation_prompt is not False,
            "tools": tools,
        }
        prompt = chosen.render(messages, context, is_marked=continues)
        if not continues:
            return prompt
        return _up_to_mark(prompt) if is_implied else _up_to_mark_exactly(prompt)

    async def render_async(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Do as `render`; large prompts are rendered in a thread, for a bounded time."""
        render = functools.partial(
            self.render,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables=variables,
        )
        if _is_small([messages, tools, variables]):
            return render()
        try:
            async with asyncio.timeout(_RENDER_SECONDS):
                return await asyncio.to_thread(render)
        except TimeoutError as error:
            raise TemplateError(f"rendering took more than {_RENDER_SECONDS:g} s") from error


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
