"""Qwen 2.5 and 3, Hermes 2 and 3 and similar models: a JSON object in tags."""

from __future__ import annotations

from typing import ClassVar

from millrace_router.tool_calls.parsing.call_format import CallFormat
from millrace_router.tool_calls.parsing.lark import ANY, literal, matching, up_to
from millrace_router.tool_calls.parsing.syntax import Syntax
from millrace_router.tool_calls.tool import ToolChoice

_OPENER, _CLOSER = "<tool_call>", "</tool_call>"


class Hermes(CallFormat):
    """`<tool_call>`, a newline, `{"name": …, "arguments": …}`, a newline, `</tool_call>` for each call."""

    name: ClassVar[str] = "hermes"
    syntax: ClassVar[Syntax] = Syntax(openers=(_OPENER,), closers=(_CLOSER,), lists=True)
    tokens: ClassVar[tuple[str, ...]] = (_OPENER, _CLOSER)

    def _forced(self, choice: ToolChoice) -> dict[str, str]:
        more = "" if choice.is_single else f" ({literal(chr(10))} tagged)*"
        return {"start": f"tagged{more}", "tagged": f"{self._marker(_OPENER)} {self._inside()}"}

    def _free(self, choice: ToolChoice) -> dict[str, str]:
        times = "?" if choice.is_single else "*"
        text = matching(ANY, without=[_OPENER])
        if _OPENER in self.markers:
            tagged = f"{self._marker(_OPENER)} {self._inside()}"
            return {"start": f"TEXT? (tagged TEXT?){times}", "tagged": tagged, "TEXT": text}
        return {
            "start": f"tagged{times} TEXT?",
            "tagged": f"UP_TO_OPENER {self._inside()}",
            "UP_TO_OPENER": up_to(_OPENER),
            "TEXT": text,
        }

    def _inside(self) -> str:
        return f"{literal(chr(10))} call {literal(chr(10))} {self._marker(_CLOSER)}"
