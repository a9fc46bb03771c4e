"""gpt-oss: messages of the channel `commentary` with a recipient, as the harmony format has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from millrace_router.tool_calls.parsing.block_format import BlockFormat, Frame
from millrace_router.tool_calls.parsing.block_parser import Block, CallSink
from millrace_router.tool_calls.parsing.cursor import Cursor, Wait
from millrace_router.tool_calls.parsing.lark import ANY, literal, matching
from millrace_router.tool_calls.tool import Tool, ToolChoice

_START, _CHANNEL, _CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"
_MESSAGE, _END, _CALL, _RETURN = "<|message|>", "<|end|>", "<|call|>", "<|return|>"
_ANY_MARKER = "<|"
_ROLE, _RECIPIENT = "assistant", " to=functions."
_BEHIND_RECIPIENT = (_CHANNEL, "analysis", "commentary", _CONSTRAIN, "json", "code")


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyReader:
    """Reads a header with a recipient, behind the role or behind the channel, and the arguments."""

    names: Sequence[str]

    def read(self, cursor: Cursor, sink: CallSink) -> Wait[bool]:
        for text in (_START, _ROLE, _CHANNEL):
            yield from cursor.take([text])
        yield from cursor.take(["commentary", "analysis"])
        yield from cursor.skip()
        if not (yield from cursor.take([_RECIPIENT.lstrip()])):
            return False
        name = yield from cursor.take(self.names)
        if not name:
            return False
        for text in _BEHIND_RECIPIENT:
            yield from cursor.skip()
            yield from cursor.take([text])
        yield from cursor.skip()
        if not (yield from cursor.take([_MESSAGE])):
            return False
        yield from cursor.skip()
        if (yield from cursor.peek()) != "{":
            return False
        sink.start(name)
        if not (yield from cursor.json(sink.give)):
            return False
        sink.end()
        return True


class Harmony(BlockFormat):
    """`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>`; the last token ends the turn.

    Reasoning is separated from text elsewhere; without that, the texts of all channels are text.
    """

    name: ClassVar[str] = "openai"
    block: ClassVar[Block] = Block(
        openers=(), kept=(_START, _CHANNEL, _RECIPIENT), closers=(_CALL, _END, _RETURN)
    )
    frame: ClassVar[Frame] = Frame(before=(_CHANNEL,), behind=())
    tokens: ClassVar[tuple[str, ...]] = (
        _START,
        _CHANNEL,
        _CONSTRAIN,
        _MESSAGE,
        _END,
        _CALL,
        _RETURN,
    )

    @property
    def openers(self) -> tuple[str, ...]:
        return (_RECIPIENT,)

    def reader(self, tools: Sequence[Tool], *, has_grammar: bool) -> HarmonyReader:  # noqa: ARG002
        return HarmonyReader(names=[tool.name for tool in tools])

    def _call(self, name: str, arguments: str) -> str:
        channel, constrain, message = map(self._marker, (_CHANNEL, _CONSTRAIN, _MESSAGE))
        header = f"{channel} {literal(f'commentary{_RECIPIENT}{name} ')} {constrain}"
        return f"{header} {literal('json')} {message} {arguments}"

    def answer_rule(self, value: str) -> str:
        """See the base: an answer is a message of the channel `final`."""
        channel, message = self._marker(_CHANNEL), self._marker(_MESSAGE)
        return f"{channel} {literal('final')} {message} {value}"

    # A prompt ends with the role. One call ends the turn, whether or not more are allowed.

    def _forced(self, choice: ToolChoice) -> dict[str, str]:  # noqa: ARG002
        return {"start": f"call {self._marker(_CALL)}?"}

    def _free(self, choice: ToolChoice) -> dict[str, str]:  # noqa: ARG002
        channel, message, end = map(self._marker, (_CHANNEL, _MESSAGE, _END))
        preamble = f"{channel} {literal('commentary')} {message} TEXT? {end}"
        role = f"{self._marker(_START)} {literal(_ROLE)}"
        return {
            "start": f"{self.answer_rule('TEXT?')} | ({preamble} {role})? call {self._marker(_CALL)}?",
            "TEXT": matching(ANY, without=(_ANY_MARKER, _RECIPIENT)),
        }
