"""The base of the call formats: their grammars and their parsers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import ClassVar

import orjson

from millrace_router.errors import ToolError
from millrace_router.request.grammar import check_schemas, read_text
from millrace_router.request.names import Names
from millrace_router.request.request import Grammar, GrammarKind
from millrace_router.tool_calls.parsing.call_parser import CallParser, UntaggedParser
from millrace_router.tool_calls.parsing.lark import (
    ANY,
    json_value,
    literal,
    matching,
    token_or_literal,
    up_to,
)
from millrace_router.tool_calls.parsing.parameters import SPACING, arguments_schema
from millrace_router.tool_calls.parsing.syntax import Syntax
from millrace_router.tool_calls.parsing.text_rule import arguments_rule, quoted_rule
from millrace_router.tool_calls.tool import (
    AnswerParser,
    Tool,
    ToolChoice,
    tool_not_found,
)
from millrace_router.tool_calls.tool_prompt import DEFAULT_TOOL_PROMPT

NO_IDS: Mapping[str, int] = MappingProxyType({})
_START = "start: "
_UNTAGGED = Syntax(
    openers=("```json\n", "```\n", "<tools>"), closers=("```", "</tools>"), bare=True, lists=True
)
"""Smaller models often write no tags, a fence, or the tags that their template has around the list of tools."""


class CallFormat(ABC):
    """How a family of models writes tool calls; stateless, one object for all requests.

    A call is a JSON object with a name and arguments, unless a format overrides `_call` or `_rules_of_call`.
    """

    name: ClassVar[str]
    """Value of `--tool-call-parser`."""
    syntax: ClassVar[Syntax]
    name_key: ClassVar[str] = "name"
    arguments_key: ClassVar[str] = "arguments"
    tokens: ClassVar[tuple[str, ...]] = ()
    """Texts around calls that are special tokens in some models."""
    tool_prompt: ClassVar[str] = DEFAULT_TOOL_PROMPT
    """Follows the tools in the last message, where the chat template does not render them."""
    has_short_ids: ClassVar[bool] = False
    """Whether the templates of its models accept only short ids of calls."""

    def __init__(self, special_ids: Mapping[str, int] = NO_IDS) -> None:
        """`special_ids` are the ids of the model's special tokens, by text."""
        self._special_ids = {text: special_ids[text] for text in self.tokens if text in special_ids}
        self.markers = frozenset(self._special_ids)
        """Special tokens that the parser needs as text. Clients never see them."""

    def grammar(self, tools: Sequence[Tool], choice: ToolChoice) -> Grammar | None:
        """Return the grammar of the whole answer; None if any text is valid.

        There is one with `required` and `named`, and with `auto` where a tool is strict.

        Raises:
            ToolError: no tool has the requested name, or a tool's parameters do not describe an object.
            ValidationError: the parameters are too long, or nested too deeply.

        """
        if not has_grammar(tools, choice):
            return None
        tools = _callable(tools, choice)
        check_schemas([tool.parameters for tool in tools])
        rules = self._forced(choice) if choice.is_forced else self._free(choice)
        names = [f"call_{index}" for index in range(len(tools))]
        rules["call"] = " | ".join(names)
        for name, tool in zip(names, tools, strict=True):
            rules |= self._rules_of_call(name, tool)
        source = "".join(f"{name}: {rule}\n" for name, rule in rules.items())
        return read_text(GrammarKind.LARK, source)

    def parser(
        self, tools: Sequence[Tool], choice: ToolChoice, names: Names | None = None
    ) -> AnswerParser:
        """Return the parser of one answer, which may lack the tags of the format, unless a grammar demands them.

        `names` has the ids of its calls; None for new ones.
        """
        # Each parser counts for itself: how many calls one has begun that is given up depends on the cuts of the text.
        new_ids = partial(self._new_ids, names or Names.new())
        tagged = self._parser(tools, choice, new_ids())
        if has_grammar(tools, choice):
            return tagged
        # A format whose own calls begin so hands them out while they arrive.
        openers = tuple(one for one in _UNTAGGED.openers if one not in self.syntax.openers)
        syntax = replace(_UNTAGGED, openers=openers, bare=not self.syntax.bare)
        tool_names = frozenset(tool.name for tool in tools)
        untagged = CallParser(syntax, tool_names, is_single=choice.is_single, new_id=new_ids())
        return UntaggedParser(tagged, untagged)

    def _new_ids(self, names: Names) -> Callable[[], str]:
        """Return what makes the ids of an answer's calls, from the first on."""
        id_of = names.short_call_id if self.has_short_ids else names.call_id
        return map(id_of, count()).__next__

    def _parser(
        self, tools: Sequence[Tool], choice: ToolChoice, new_id: Callable[[], str]
    ) -> AnswerParser:
        """Return the parser of an answer with the tags of the format."""
        openers = self.syntax.openers
        # The grammar of a strict tool has calls at the start of the answer only, and any text on later lines.
        if self.syntax.bare and not any(tool.strict for tool in tools):
            openers = (*openers, "\n")
        return CallParser(
            replace(self.syntax, openers=openers, hidden=self.markers),
            frozenset(tool.name for tool in tools),
            is_single=choice.is_single,
            new_id=new_id,
        )

    @property
    def openers(self) -> tuple[str, ...]:
        """Texts that begin calls and nothing else, as a word or a fence could."""
        return tuple(one for one in self.syntax.openers if one.startswith(("<", "[")))

    def answer_rule(self, value: str) -> str:
        """Return the rule of an answer without calls that consists of `value`."""
        return value

    @abstractmethod
    def _forced(self, choice: ToolChoice) -> dict[str, str]:
        """Rules from `start` on for an answer that consists of calls; each is a `call`."""

    @abstractmethod
    def _free(self, choice: ToolChoice) -> dict[str, str]:
        """Rules from `start` on for text with calls; each is a `call`."""

    def _rules_of_call(self, rule: str, tool: Tool) -> dict[str, str]:
        """Return the rules of one call by name: `rule`, and those that it needs, whose names begin with `rule`."""
        if tool.text is not None:
            text = f"{rule}_text"
            return {rule: self._call(tool.name, arguments_rule(text)), text: quoted_rule(tool.text)}
        return {rule: self._call(tool.name, json_value(arguments_schema(tool)))}

    def _call(self, name: str, arguments: str) -> str:
        """Return the rule of one call whose arguments are JSON; `arguments` is their rule."""
        # The pieces equal `%json`'s: where both are possible, the lexer looks for the longer literal only.
        called = json.dumps(name, ensure_ascii=False)
        keys = json.dumps(self.name_key), json.dumps(self.arguments_key)
        pieces = ("{", keys[0], ": ", called, ", ", keys[1], ": ")
        return f"{' '.join(map(literal, pieces))} {arguments} {literal('}')}"

    def _marker(self, text: str) -> str:
        return token_or_literal(text, self._special_ids)


def has_grammar(tools: Sequence[Tool], choice: ToolChoice) -> bool:
    """Return whether answers have to match a grammar."""
    return choice.is_forced or (choice.kind == "auto" and any(tool.strict for tool in tools))


def chat_grammar(
    call_format: CallFormat, tools: Sequence[Tool], choice: ToolChoice, answer: Grammar | None
) -> Grammar | None:
    """Return the grammar of a chat with tools; None if any text is valid. Raises as `CallFormat.grammar` does.

    `answer` is the schema of an answer without calls; None for any text.
    """
    if answer is None:
        return call_format.grammar(tools, choice)
    calls = call_format.grammar(tools, replace(choice, kind="required"))
    assert calls is not None
    assert calls.source.startswith(_START)
    value = json_value({**orjson.loads(answer.source), "x-guidance": SPACING})
    rules = calls.source.removeprefix(_START)
    return Grammar(
        GrammarKind.LARK,
        f"{_START}calls | answer\nanswer: {call_format.answer_rule(value)}\ncalls: {rules}",
    )


def _callable(tools: Sequence[Tool], choice: ToolChoice) -> list[Tool]:
    """Return the tools that may be called; raises ToolError if there is none."""
    if choice.kind == "named":
        named = [tool for tool in tools if tool.name == choice.name][:1]
        if not named:
            raise tool_not_found(choice.name or "", [tool.name for tool in tools])
        return named
    if not tools:
        raise ToolError("a tool call is required, but `tools` is empty")
    return list(tools)


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
