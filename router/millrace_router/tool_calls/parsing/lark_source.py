"""Lark's own terminals, which a grammar imports from `common`, as expressions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from millrace_router.errors import ToolError

_FRACTION = r"(?:[0-9]+\.[0-9]*|\.[0-9]+)"
_FLOAT = rf"(?:[0-9]+[eE][+\-]?[0-9]+|{_FRACTION}(?:[eE][+\-]?[0-9]+)?)"
COMMON: Mapping[str, str] = {
    "DIGIT": r"[0-9]",
    "HEXDIGIT": r"[a-fA-F0-9]",
    "INT": r"[0-9]+",
    "SIGNED_INT": r"[+\-]?[0-9]+",
    "DECIMAL": _FRACTION,
    "FLOAT": _FLOAT,
    "NUMBER": f"(?:{_FLOAT}|[0-9]+)",
    "SIGNED_NUMBER": rf"[+\-]?(?:{_FLOAT}|[0-9]+)",
    "SIGNED_FLOAT": rf"[+\-]?{_FLOAT}",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "LCASE_LETTER": r"[a-z]",
    "UCASE_LETTER": r"[A-Z]",
    "LETTER": r"[a-zA-Z]",
    "WORD": r"[a-zA-Z]+",
    "CNAME": r"[a-zA-Z_][a-zA-Z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
    "C_COMMENT": r"\/\*[^*]*\*+(?:[^\/*][^*]*\*+)*\/",
}


_TOKEN = re.compile(
    r"""(?P<blank>[ \t]+|(?:\#|//)[^\n]*)
    |(?P<range>"(?:\\.|[^"\\\n])+"[ \t]*\.\.[ \t]*"(?:\\.|[^"\\\n])+")
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\])+/[a-z]*)
    |(?P<common>%import[ \t]+common[ \t]*
        (?:\.[ \t]*(?P<one>\w+)(?:[ \t]*->[ \t]*(?P<alias>\w+))?|\((?P<several>[^)\n]*)\)))
    |(?P<head>(?<![^\n])[ \t]*[?!]*(?P<name>_?[a-zA-Z][\w\-]*)[ \t]*:)
    |(?P<alias_of_rule>->[ \t]*\w+)
    |(?P<reference>_?[a-zA-Z][\w\-]*)
    |(?P<number>\{[0-9, \t]*\}|~[ \t]*[0-9]+(?:[ \t]*\.\.[ \t]*[0-9]+)?)
    |(?P<operator>[()\[\]|+*?&\n\r])
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_RANGE = re.compile(r'(?<=")[ \t]*\.\.[ \t]*(?=")')


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly this text, or one that differs in case."""

    text: str
    ignores_case: bool = False


@dataclass(frozen=True, slots=True)
class Expression:
    """A text that matches an expression."""

    source: str
    flags: str = ""


@dataclass(frozen=True, slots=True)
class Reference:
    """What a definition has."""

    name: str


Part = Literal | Expression | Reference | str
"""Operators are strings."""


@dataclass(slots=True)
class LarkSource:
    """The definitions of a grammar by name, terminals and rules alike."""

    definitions: dict[str, list[Part]] = field(default_factory=dict)

    @classmethod
    def of(cls, source: str) -> LarkSource:
        """Read; raises ToolError for what is not plain Lark, as `%ignore` and the options of rules are."""
        made = cls()
        current: list[Part] = []
        for token in _TOKEN.finditer(source):
            if token["head"] is not None:
                current = made.definitions.setdefault(token["name"], [])
            elif token["common"] is not None:
                made.definitions |= {
                    name: [Expression(COMMON[common])] for name, common in _imported(token)
                }
            else:
                current += _parts_of(token)
        for parts in made.definitions.values():
            made._check_names(parts)
        made._check_names([Reference("start")])
        return made

    def references(self, name: str) -> set[str]:
        return {part.name for part in self.definitions[name] if isinstance(part, Reference)}

    def _check_names(self, parts: list[Part]) -> None:
        for part in parts:
            if isinstance(part, Reference) and part.name not in self.definitions:
                raise unsupported(f"no definition of `{part.name[:40]}`")


def unsupported(part: str) -> ToolError:
    """Return the error for a grammar that has `part`."""
    return ToolError(
        f"the grammar of a tool has {part}, which this model's call format cannot keep"
    )


def _parts_of(token: re.Match[str]) -> Iterator[Part]:
    text = token[0]
    if token["string"] is not None:
        yield Literal(_plain(text.removesuffix("i")), text.endswith("i"))
    elif token["range"] is not None:
        yield _range(text)
    elif token["regex"] is not None:
        inner, _, flags = text[1:].rpartition("/")
        yield Expression(inner, flags)
    elif token["reference"] is not None:
        yield Reference(text)
    elif token["number"] is not None or (token["operator"] is not None and text not in "\n\r"):
        yield text
    elif token["other"] is not None:
        raise unsupported(f"`{token.string[token.start() : token.start() + 20]}`")


def _range(text: str) -> Expression:
    first, last = map(_plain, _RANGE.split(text))
    if not (len(first) == len(last) == 1):
        raise unsupported(f"the range `{text[:40]}`, which must be a range of characters")
    return Expression(f"[{re.escape(first)}-{re.escape(last)}]")


def _plain(text: str) -> str:
    try:
        plain: str = json.loads(text, strict=False)
    except json.JSONDecodeError:
        raise unsupported(f"the literal `{text[:40]}`") from None
    return plain


def _imported(token: re.Match[str]) -> Iterator[tuple[str, str]]:
    """Yield the names of what is imported: here, and in `common`."""
    if token["one"]:
        names = [(token["alias"] or token["one"], token["one"])]
    else:
        names = [(name.strip(), name.strip()) for name in token["several"].split(",")]
    for name, common in names:
        if common not in COMMON:
            raise unsupported(f"the import `{common[:40]}`")
        yield name, common
