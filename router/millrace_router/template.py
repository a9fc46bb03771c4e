"""Chat templates: messages to prompt. Templates come from model repositories, so they run in a sandbox."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import orjson
from jinja2 import TemplateError as JinjaError
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from millrace_router.errors import TemplateError
from millrace_router.model_files import ModelFiles

Message = dict[str, Any]

_END_MARK = "\ue0f1\ue0f2\ue0f1"
"""Private-use characters that mark the end of a message to be continued."""
_LARGE_PROMPT_CHARS = 16_384
_RENDER_SECONDS = 30.0
_MAX_INDENTED_CHARS = 8_000_000
"""Indentation makes a deeply nested list a hundred times as long as it was on its way here."""


class ChatTemplate:
    """A compiled template with the model's special tokens; without a source every render is refused."""

    def __init__(self, source: str | None, *, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self._template = None
        self._fault = "template not found"
        if source is not None:
            try:
                self._template = _environment().from_string(source)
            # The compiler's own mistakes come as anything; a bad template is to refuse chats, and nothing else.
            except Exception as error:  # noqa: BLE001
                self._fault = f"the model's chat template is not valid: {error}"

    @classmethod
    def of(cls, files: ModelFiles) -> ChatTemplate:
        """Take the template of a model folder."""
        return cls(files.chat_template, special_tokens=files.special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of `messages`, whose contents are strings.

        If the assistant spoke last, the prompt ends right after its words, so that generation continues them.
        `variables` are further names for the template; they hide none of its own.

        Raises:
            TemplateError: there is no template, it is not valid, or it refuses the messages.

        """
        if self._template is None:
            raise TemplateError(self._fault)
        continues = bool(messages) and _is_open(messages[-1])
        context = {
            **(variables or {}),
            **self._special_tokens,
            "messages": [*messages[:-1], _marked(messages[-1])] if continues else list(messages),
            "add_generation_prompt": add_generation_prompt and not continues,
            "tools": tools,
        }
        try:
            prompt = self._template.render(context)
        # Templates are programs of strangers: anything may go wrong in one.
        except Exception as error:
            raise TemplateError(str(error) or type(error).__name__) from error
        if not continues or _END_MARK not in prompt:
            return prompt
        return prompt.rpartition(_END_MARK)[0].replace(_END_MARK, "").rstrip()

    async def render_async(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Do as `render`; what is large in a thread, for a bounded time."""
        render = functools.partial(
            self.render,
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables=variables,
        )
        num_chars = sum(len(message.get("content") or "") + 16 for message in messages)
        if tools or variables:
            num_chars += len(orjson.dumps([tools, variables]))
        if num_chars < _LARGE_PROMPT_CHARS:
            return render()
        try:
            async with asyncio.timeout(_RENDER_SECONDS):
                return await asyncio.to_thread(render)
        except TimeoutError as error:
            raise TemplateError(f"rendering took more than {_RENDER_SECONDS:g} s") from error


def _is_open(message: Message) -> bool:
    return message.get("role") == "assistant" and isinstance(message.get("content"), str)


def _marked(message: Message) -> Message:
    return {**message, "content": message["content"] + _END_MARK}


class _GenerationTags(Extension):
    """`{% generation %}` blocks, which tell training what the assistant said, are plain text here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return what transformers gives templates: whitespace rules, `tojson`, `raise_exception`, `strftime_now`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTags, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  (templates may give it by position)
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
    # Local time, as in transformers: templates write it as the user's date.
    return datetime.now().astimezone().strftime(pattern)
