"""What the formats share: when there is a grammar, how it is put together, and the parser."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar

from millrace_router.errors import ToolError
from millrace_router.request.grammar import check_schemas, read_text
from millrace_router.request.request import Grammar, GrammarKind
from millrace_router.tool_calls.arguments_schema import arguments_schema
from millrace_router.tool_calls.call_parser import CallParser
from millrace_router.tool_calls.lark import json_value, literal, token_or_literal
from millrace_router.tool_calls.syntax import Syntax
from millrace_router.tool_calls.tool import Tool, ToolChoice, new_call_id
from millrace_router.tool_calls.tool_format import ToolParser

NO_IDS: Mapping[str, int] = MappingProxyType({})


class CallFormat(ABC):
    """A `ToolFormat`; a call is a JSON object with a name and arguments, unless `_call` says otherwise."""

    name: ClassVar[str]
    syntax: ClassVar[Syntax]
    arguments_key: ClassVar[str] = "arguments"
    tokens: ClassVar[tuple[str, ...]] = ()
    """Texts around calls that are special tokens in some models."""
    new_id: Callable[[], str] = staticmethod(new_call_id)

    def __init__(self, special_ids: Mapping[str, int] = NO_IDS) -> None:
        """`special_ids` are those of the model's special tokens, by text."""
        self._special_ids = {text: special_ids[text] for text in self.tokens if text in special_ids}
        self.markers = frozenset(self._special_ids)

    def grammar(self, tools: Sequence[Tool], choice: ToolChoice) -> Grammar | None:
        """Return what the whole answer has to match, as `ToolFormat` has it."""
        if not has_grammar(tools, choice):
            return None
        tools = _callable(tools, choice)
        check_schemas([tool.parameters for tool in tools])
        calls = [self._call(tool.name, json_value(arguments_schema(tool))) for tool in tools]
        rules = self._forced(choice) if choice.is_forced else self._free(choice)
        rules["call"] = " | ".join(f"call_{index}" for index in range(len(calls)))
        rules |= {f"call_{index}": call for index, call in enumerate(calls)}
        source = "".join(f"{name}: {rule}\n" for name, rule in rules.items())
        return read_text(GrammarKind.LARK, source)

    def parser(self, tools: Sequence[Tool], choice: ToolChoice) -> ToolParser:
        """Return a parser for one answer."""
        openers = self.syntax.openers
        # The grammar that a strict tool makes has calls nowhere but where answers begin, and any text on later lines.
        if self.syntax.bare and not any(tool.strict for tool in tools):
            openers = (*openers, "\n")
        return CallParser(
            replace(self.syntax, openers=openers, hidden=self.markers),
            frozenset(tool.name for tool in tools),
            is_single=choice.is_single,
            new_id=self.new_id,
        )

    @abstractmethod
    def _forced(self, choice: ToolChoice) -> dict[str, str]:
        """Rules from `start` on for an answer of nothing but calls, each a `call`."""

    @abstractmethod
    def _free(self, choice: ToolChoice) -> dict[str, str]:
        """Rules from `start` on for text with calls, each a `call`."""

    def _call(self, name: str, arguments: str) -> str:
        """Rule of one call, `arguments` being the rule of its arguments."""
        # In the pieces that `%json` has: where both may come, the longer literal would be all that is looked for.
        called = json.dumps(name, ensure_ascii=False)
        pieces = ("{", '"name"', ": ", called, ", ", json.dumps(self.arguments_key), ": ")
        return f"{' '.join(map(literal, pieces))} {arguments} {literal('}')}"

    def _marker(self, text: str) -> str:
        return token_or_literal(text, self._special_ids)


def has_grammar(tools: Sequence[Tool], choice: ToolChoice) -> bool:
    """Whether answers have to match anything."""
    return choice.is_forced or (choice.kind == "auto" and any(tool.strict for tool in tools))


def _callable(tools: Sequence[Tool], choice: ToolChoice) -> list[Tool]:
    """Tools that may be called; raises ToolError if there is none."""
    if choice.kind == "named":
        tools = [tool for tool in tools if tool.name == choice.name][:1]
        if not tools:
            raise ToolError(f"Tool with name {choice.name} not found")
    if not tools:
        raise ToolError("a call is asked for, and there is no tool")
    return list(tools)
