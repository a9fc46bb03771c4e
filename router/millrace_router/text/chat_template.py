"""Chat templates: messages to prompt. Templates come from model repositories, so they run in a sandbox."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import orjson

from millrace_router.errors import TemplateError
from millrace_router.text.model_files import ModelFiles
from millrace_router.text.template_environment import template_environment
from millrace_router.text.template_messages import Message, lacks_content, messages_for
from millrace_router.text.template_shape import TemplateShape

_END_MARK = "\ue0f1\ue0f2\ue0f1"
"""Private-use characters that mark the end of a message to be continued."""
_LARGE_PROMPT_CHARS = 16_384
_RENDER_SECONDS = 30.0

_NO_SHAPE = TemplateShape()


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A template, or why there is none."""

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
        # The compiler's own mistakes come as anything; a bad template is to refuse chats, and nothing else.
        except Exception as error:  # noqa: BLE001
            return cls(fault=f"the model's chat template is not valid: {error}")

    def render(
        self, messages: Sequence[Message], context: Mapping[str, Any], *, is_marked: bool
    ) -> str:
        """Render, with a mark at the end of the last message if it `is_marked`; raises TemplateError.

        Of None and no text, some templates bear only one for the content of a turn of calls, whatever they ask for.
        """
        stand_ins = [None, ""] if self.shape.asks_for_none else ["", None]
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
        # Templates are programs of strangers: anything may go wrong in one.
        except Exception as error:
            raise TemplateError(str(error) or type(error).__name__) from error


class ChatTemplate:
    """A compiled template with the model's special tokens; without a source every render is refused."""

    def __init__(
        self,
        source: str | None,
        *,
        special_tokens: Mapping[str, str],
        tool_source: str | None = None,
    ) -> None:
        """`tool_source` is the template for chats with tools, if it is another."""
        self.special_tokens = dict(special_tokens)
        """Texts by name, such as `eos_token`."""
        self.source = source
        self._plain = _Compiled.of(source)
        self._with_tools = self._plain if tool_source is None else _Compiled.of(tool_source)
        self.tool_source = source if tool_source is None else tool_source
        """Source of the template that tools are given to."""

    @classmethod
    def of(cls, files: ModelFiles) -> ChatTemplate:
        """Take the templates of a model folder."""
        return cls(
            files.chat_template,
            special_tokens=files.special_tokens,
            tool_source=files.tool_template,
        )

    @property
    def lists_tools(self) -> bool:
        """Whether the model is told of its tools by the template; else the messages have to."""
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
        """Return the prompt of `messages`, which `messages_for` describes.

        If neither option is given and the assistant spoke last, the prompt ends right after its words, without blanks,
        so that generation continues them; that is TGI's rule. `continue_final_message` keeps the blanks that the
        template keeps, as in transformers. `variables` are further names for it; they hide none of its own.

        Raises:
            TemplateError: there is no template, it is not valid, or it refuses the messages.

        """
        chosen = self._with_tools if tools else self._plain
        if continue_final_message and add_generation_prompt:
            raise TemplateError("a message that is continued is followed by no generation prompt")
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
        """Do as `render`; what is large in a thread, for a bounded time."""
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
    """Whether rendering takes no time worth a thread."""
    try:
        return len(orjson.dumps(values)) < _LARGE_PROMPT_CHARS
    except orjson.JSONEncodeError:
        # Nested too deeply for it.
        return False


def _is_open(messages: Sequence[Message]) -> bool:
    """Whether TGI would have the last message continued."""
    if not messages or messages[-1].get("role") != "assistant":
        return False
    return messages[-1].get("content") is not None and not messages[-1].get("tool_calls")


def _marked(messages: list[Message]) -> list[Message]:
    """Messages whose last one ends with a mark, and a blank to see whether the template trims it."""
    if not messages or messages[-1]["content"] is None or "tool_calls" in messages[-1]:
        raise TemplateError("the last message has no text that could be continued")
    content = messages[-1]["content"]
    if isinstance(content, str):
        content += f"{_END_MARK} "
    else:
        *others, last = content or [{"type": "text", "text": ""}]
        content = [*others, {**last, "text": f"{last['text']}{_END_MARK} "}]
    return [*messages[:-1], {**messages[-1], "content": content}]


def _up_to_mark(prompt: str) -> str:
    """As TGI does: without blanks, and all of the prompt where the template has dropped the message."""
    before, mark, _ = prompt.rpartition(_END_MARK)
    return _without_marks(before).rstrip() if mark else prompt


def _up_to_mark_exactly(prompt: str) -> str:
    """As transformers does: with the blanks that the template keeps."""
    before, mark, after = prompt.rpartition(_END_MARK)
    if not mark:
        raise TemplateError("the chat template leaves out the message that is to be continued")
    before = _without_marks(before)
    return before if after.startswith(" ") else before.rstrip()


def _without_marks(prompt: str) -> str:
    """Templates may write a message more than once."""
    return prompt.replace(f"{_END_MARK} ", "").replace(_END_MARK, "")
