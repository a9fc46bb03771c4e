"""Formats of one JSON list behind a marker: Granite 3, Phi-4-mini, Cohere's Command, Nemotron; and MiniMax M1."""

from __future__ import annotations

import json
from typing import ClassVar

from millrace_router.tool_calls.call_format import CallFormat
from millrace_router.tool_calls.lark import ANY, literal, matching, up_to
from millrace_router.tool_calls.syntax import Syntax
from millrace_router.tool_calls.tool import ToolChoice
from millrace_router.tool_calls.tool_prompt import prompt_for


class Listed(CallFormat):
    """An opener and a list of `{"name": …, "arguments": …}`."""

    opener: ClassVar[str]
    """The first of the openers of the syntax, which a grammar demands."""
    behind: ClassVar[str] = ""
    """Follows the list, if it is not empty."""
    between: ClassVar[str] = ", "
    edges: ClassVar[tuple[str, str]] = ("[", "]")

    def _forced(self, choice: ToolChoice) -> dict[str, str]:
        return {"start": f"{self._marker(self.opener)} {self._list(choice)}"}

    def _free(self, choice: ToolChoice) -> dict[str, str]:
        text = matching(ANY, without=self.syntax.openers)
        if self.opener in self.markers:
            start = f"TEXT? ({self._forced(choice)['start']})?"
            return {"start": start, "TEXT": text}
        others = [one for one in self.syntax.openers if one not in self.opener]
        return {
            "start": f"TEXT | UP_TO_OPENER {self._list(choice)}",
            "UP_TO_OPENER": up_to(self.opener, without=others),
            "TEXT": text,
        }

    def _list(self, choice: ToolChoice) -> str:
        more = "" if choice.is_single else f" ({literal(self.between)} call)*"
        behind = f" {self._marker(self.behind)}" if self.behind else ""
        return f"{literal(self.edges[0])} call{more} {literal(self.edges[1])}{behind}"


class Granite(Listed):
    """`<|tool_call|>[{"name": …, "arguments": …}]`; a 20B model writes `<function_call>` and an object."""

    name: ClassVar[str] = "granite"
    opener: ClassVar[str] = "<|tool_call|>"
    syntax: ClassVar[Syntax] = Syntax(
        openers=("<|tool_call|>", "<tool_call>", "<function_call>"), separators=",", lists=True
    )
    tokens: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "<function_call>")


class Phi4Mini(Listed):
    """`functools[{"name": …, "arguments": …}]`, or the same list in the tokens of the model's card."""

    name: ClassVar[str] = "phi4_mini_json"
    tool_prompt: ClassVar[str] = prompt_for(
        'functools[{"name": function name, "arguments": arguments}]'
    )
    opener: ClassVar[str] = "functools"
    syntax: ClassVar[Syntax] = Syntax(
        openers=("functools", "<|tool_call|>"), closers=("<|/tool_call|>",), lists=True
    )
    tokens: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "<|/tool_call|>")


_ID = '{"tool_call_id": "'


class Cohere(Listed):
    """`<|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": …}]<|END_ACTION|>`."""

    name: ClassVar[str] = "cohere_command3"
    opener: ClassVar[str] = "<|START_ACTION|>"
    behind: ClassVar[str] = "<|END_ACTION|>"
    between: ClassVar[str] = ",\n    "
    edges: ClassVar[tuple[str, str]] = ("[\n    ", "\n]")
    syntax: ClassVar[Syntax] = Syntax(
        openers=("<|START_ACTION|>",), closers=("<|END_ACTION|>",), lists=True
    )
    name_key: ClassVar[str] = "tool_name"
    arguments_key: ClassVar[str] = "parameters"
    tokens: ClassVar[tuple[str, ...]] = ("<|START_ACTION|>", "<|END_ACTION|>")

    def _call(self, name: str, arguments: str) -> str:
        called = json.dumps(name, ensure_ascii=False)
        before = literal(_ID) + r" /[0-9]{1,4}/"
        head = literal(f'", "tool_name": {called}, "parameters": ')
        return f"{before} {head} {arguments} {literal('}')}"


class Nemotron(Listed):
    """`<TOOLCALL>[{"name": …, "arguments": …}]</TOOLCALL>`."""

    name: ClassVar[str] = "nemotron_json"
    opener: ClassVar[str] = "<TOOLCALL>"
    behind: ClassVar[str] = "</TOOLCALL>"
    syntax: ClassVar[Syntax] = Syntax(openers=("<TOOLCALL>",), closers=("</TOOLCALL>",), lists=True)
    tokens: ClassVar[tuple[str, ...]] = ("<TOOLCALL>", "</TOOLCALL>")


class MiniMaxM1(Listed):
    """`<tool_calls>`, a line with `{"name": …, "arguments": …}` for each call, `</tool_calls>`."""

    name: ClassVar[str] = "minimax"
    opener: ClassVar[str] = "<tool_calls>"
    behind: ClassVar[str] = "</tool_calls>"
    between: ClassVar[str] = "\n"
    edges: ClassVar[tuple[str, str]] = ("\n", "\n")
    syntax: ClassVar[Syntax] = Syntax(
        openers=("<tool_calls>",), closers=("</tool_calls>",), separators=",", lists=True
    )
    tokens: ClassVar[tuple[str, ...]] = ("<tool_calls>", "</tool_calls>")
