"""Mistral's models, older and newer: a list, or a name and arguments, behind a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from millrace_router.tool_calls.parsing.call_format import NO_IDS, CallFormat
from millrace_router.tool_calls.parsing.lark import ANY, literal, matching, up_to
from millrace_router.tool_calls.parsing.syntax import Syntax
from millrace_router.tool_calls.tool import ToolChoice

_OPENER, _CALL_ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Mistral(CallFormat):
    """`[TOOL_CALLS]` and a list of `{"name": …, "arguments": …}`, or `[TOOL_CALLS]name[ARGS]{…}` for each call.

    The parser reads both forms; a grammar has the form of the model.
    """

    name: ClassVar[str] = "mistral"
    syntax: ClassVar[Syntax] = Syntax(openers=(_OPENER,), lists=True, names=True)
    tokens: ClassVar[tuple[str, ...]] = (_OPENER, _CALL_ID, _ARGUMENTS)
    has_short_ids: ClassVar[bool] = True

    def __init__(self, special_ids: Mapping[str, int] = NO_IDS, *, has_names: bool = False) -> None:
        """With `has_names` the model writes calls in the newer form."""
        super().__init__(special_ids)
        self._has_names = has_names

    def _call(self, name: str, arguments: str) -> str:
        if not self._has_names:
            return super()._call(name, arguments)
        return f"{literal(name)} {self._marker(_ARGUMENTS)} {arguments}"

    def _forced(self, choice: ToolChoice) -> dict[str, str]:
        opened = f"{self._marker(_OPENER)} {self._opened(choice)}"
        return {"start": opened if choice.is_single or not self._has_names else f"({opened})+"}

    def _free(self, choice: ToolChoice) -> dict[str, str]:
        times = "?" if choice.is_single or not self._has_names else "*"
        text = matching(ANY, without=[_OPENER])
        opened = self._opened(choice)
        if _OPENER in self.markers:
            start = f"TEXT? ({self._marker(_OPENER)} {opened} TEXT?){times}"
            return {"start": start, "TEXT": text}
        start = f"(UP_TO_OPENER {opened}){times} TEXT?"
        return {"start": start, "UP_TO_OPENER": up_to(_OPENER), "TEXT": text}

    def _opened(self, choice: ToolChoice) -> str:
        """Return the rule of the text after one opener."""
        if self._has_names:
            return "call"
        more = "" if choice.is_single else f" ({literal(', ')} call)*"
        # SentencePiece models write a blank before the list.
        return f"{literal(' ')}? {literal('[')} call{more} {literal(']')}"
