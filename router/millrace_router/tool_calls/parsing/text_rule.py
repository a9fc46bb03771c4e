"""Turns an expression into one for the same texts as JSON writes them inside a string."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

from millrace_router.request.request import Grammar, GrammarKind
from millrace_router.tool_calls.parsing.lark import ANY, escaped, literal, pattern
from millrace_router.tool_calls.parsing.lark_source import (
    Expression,
    LarkSource,
    Literal,
    Part,
    Reference,
    unsupported,
)
from millrace_router.tool_calls.text_tool import PARAMETER

ESCAPES = {
    '"': r"\\\"",
    "\\": r"\\\\",
    "\n": r"\\n",
    "\r": r"\\r",
    "\t": r"\\t",
    "\b": r"\\b",
    "\f": r"\\f",
}
"""The expressions of the characters that JSON escapes; no other control character is possible."""
_UNESCAPED = r'[^"\\\x00-\x1f]'
_NAMED = {"n": "\n", "r": "\r", "t": "\t", "f": "\f"}
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|[xu]\{([0-9a-fA-F]{1,6})\}")
_GROUP = re.compile(
    r"\((?:\?(?:P?<\w+>|(?P<flags>[a-zA-Z]*)(?:-(?P<off>[a-zA-Z]+))?(?P<end>[:)])))?"
)
_ODD_IN_CLASS = re.compile(r"&&|--|~~|(?<!\\)\[(?<!^\[)|\\[pPbBx]\{?|\\u")
_KINDS = frozenset("dDwWsS")
_QUOTED_CODE = r"(?-i:{})"


def unanchored(source: str) -> str:
    """Return an expression of whole texts without anchors, which mean nothing there; raises ToolError for others."""
    pieces = list(_pieces(source))
    kept: list[str] = []
    for index, piece in enumerate(pieces):
        before, behind = "".join(kept[-1:])[-1:], "".join(pieces[index + 1 : index + 2])
        if piece == "^" and before in {"", "(", "|", ":"}:
            continue
        if piece == "$" and behind in {"", ")", "|"}:
            continue
        if piece in {"^", "$"}:
            raise unsupported(f"`{piece}` within an expression")
        kept.append(piece)
    return "".join(kept)


def _pieces(source: str) -> Iterator[str]:
    """Yield escapes and classes whole, and all other characters."""
    position = 0
    while position < len(source):
        length = 2 if source[position] == "\\" else 1
        if source[position] == "[":
            length = len(_class_at(source, position))
        yield source[position : position + length]
        position += length


def _class_at(source: str, position: int) -> str:
    match = _CLASS.match(source, position)
    if match is None:
        raise unsupported(f"the class `{source[position : position + 40]}` of an expression")
    return match[0]


class RegexQuoter:
    """Rewrites one expression, part by part."""

    def __init__(self, source: str, *, flags: str = "") -> None:
        """`flags` are those behind an expression of Lark."""
        self._source = source
        self._has_dot_all = "s" in flags
        if "x" in flags:
            raise unsupported("the flag `x`")

    def quoted(self) -> str:
        """Return the expression; raises ToolError for parts that are not supported here."""
        return "".join(self._parts())

    def _parts(self) -> Iterator[str]:
        source, position = self._source, 0
        outer: list[bool] = []
        """For each open group, whether a dot matched newlines outside of it."""
        while position < len(source):
            char = source[position]
            if char == "\\":
                part, length = self._escape(position)
            elif char == "[":
                part, length = self._class(position)
            elif char == "(":
                part, length = self._group(position, outer)
            elif char == ".":
                part, length = _of_class(r"[\s\S]" if self._has_dot_all else r"[^\n]"), 1
            else:
                part, length = (_of_character(char) if char in ESCAPES else char), 1
                if char == ")" and outer:
                    self._has_dot_all = outer.pop()
            yield part
            position += length

    def _escape(self, position: int) -> tuple[str, int]:
        """Return the part of an escape, and its length."""
        source = self._source
        if code := _CODE.match(source, position + 1):
            number = int(code[1] or code[2] or code[3], 16)
            return _of_character(chr(min(number, 0x10FFFF))), 1 + len(code[0])
        char = source[position + 1 : position + 2]
        if char in _KINDS:
            return _of_class(f"[\\{char}]"), 2
        if char in _NAMED:
            return _of_character(_NAMED[char]), 2
        if not char or char.isalnum() or char in "<>":
            raise unsupported(f"`\\{char}` in an expression")
        return (_of_character(char) if char in ESCAPES else f"\\{char}"), 2

    def _class(self, position: int) -> tuple[str, int]:
        match = _class_at(self._source, position)
        if _ODD_IN_CLASS.search(match, 1):
            raise unsupported(f"the class `{match[:40]}` of an expression")
        return _of_class(match), len(match)

    def _group(self, position: int, outer: list[bool]) -> tuple[str, int]:
        match = _GROUP.match(self._source, position)
        if match is None or (match[0] == "(" and self._source[position + 1 : position + 2] == "?"):
            raise unsupported(f"`{self._source[position : position + 4]}` in an expression")
        flags, off = match["flags"] or "", match["off"] or ""
        if "x" in flags:
            raise unsupported("the flag `x`")
        if match["end"] != ")":
            outer.append(self._has_dot_all)
        self._has_dot_all = (self._has_dot_all or "s" in flags) and "s" not in off
        return match[0], len(match[0])


def _of_character(char: str) -> str:
    if char in ESCAPES:
        return _QUOTED_CODE.format(ESCAPES[char])
    if char < " ":
        raise unsupported(f"the character {char!r}")
    return re.escape(char)


def _of_class(source: str) -> str:
    """Return the expression of one character of a class."""
    try:
        compiled = re.compile(source)
    except re.error as error:
        raise unsupported(f"the class `{source[:40]}`: {error}") from None
    codes = [code for char, code in ESCAPES.items() if compiled.fullmatch(char)]
    plain = f"[{source}&&{_UNESCAPED}]"
    if not codes:
        return plain
    return f"(?:{plain}|{_QUOTED_CODE.format('|'.join(codes))})"


def quoted_rule(text: Grammar) -> str:
    """Return the rule of the input inside a JSON string, and the quote behind it; raises ToolError if there is none."""
    return _rule(text, end='"', mark="", is_quoted=True)


def plain_rule(text: Grammar, end: str, mark: str) -> str:
    """Return the rule of the input as it is and `end`, where the input does not contain `mark`; raises ToolError.

    `end` is empty or ends with `mark`, or with no part of it where `mark` is a single token.
    """
    return _rule(text, end=end, mark=mark, is_quoted=False)


def arguments_rule(text_rule: str) -> str:
    """Return the rule of all arguments as JSON; `text_rule` is the name of the quoted rule."""
    before = "{", f'"{PARAMETER}"', ": ", '"'
    return " ".join((*map(literal, before), text_rule, literal("}")))


def _rule(text: Grammar, *, end: str, mark: str, is_quoted: bool) -> str:
    """Return the rule, whose terminals are in a separate grammar, so that names may be anything."""
    if text.kind is GrammarKind.REGEX:
        source = LarkSource({"start": [Expression(text.source)]})
    else:
        source = LarkSource.of(text.source)
    names = {name: f"PART_{index}" for index, name in enumerate(source.definitions)}
    try:
        order = list(
            TopologicalSorter({name: source.references(name) for name in names}).static_order()
        )
    except CycleError as error:
        raise unsupported(f"the rule `{error.args[1][0][:40]}` within itself") from None
    lines = [
        f"{names[name]}: {_written(source.definitions[name], names, is_quoted=is_quoted)}"
        for name in order
    ]
    whole = f"({names['start']} {literal(end)})" if end else names["start"]
    if mark:
        behind = "(?s:.+)" if end.endswith(mark) else ANY
        whole += f" & ~{pattern(f'{ANY}{escaped(mark)}{behind}')}"
    return "%lark {\n" + "\n".join(("start: TEXT", f"TEXT: {whole}", *lines)) + "\n}"


def _written(parts: list[Part], names: dict[str, str], *, is_quoted: bool) -> str:
    return " ".join(_part(part, names, is_quoted=is_quoted) for part in parts)


def _part(part: Part, names: dict[str, str], *, is_quoted: bool) -> str:
    match part:
        case Reference(name):
            return names[name]
        case Literal(plain, False):
            inside = json.dumps(plain, ensure_ascii=False)[1:-1] if is_quoted else plain
            return literal(inside)
        case Literal(plain, _):
            return _expression(escaped(plain), "i", is_quoted=is_quoted) if plain else '""'
        case Expression(source, flags):
            return _expression(source, flags, is_quoted=is_quoted)
        case operator:
            return operator


def _expression(source: str, flags: str, *, is_quoted: bool) -> str:
    whole = unanchored(source)
    return pattern(RegexQuoter(whole, flags=flags).quoted() if is_quoted else whole) + flags
