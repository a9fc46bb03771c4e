"""The grammar of a call that is an expression: literals that match the schemas of the arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import ClassVar

from millrace_router.errors import ToolError
from millrace_router.request.request import Grammar
from millrace_router.request.schemas import Schema
from millrace_router.tool_calls.parsing.block_format import BlockFormat, CallGrammar
from millrace_router.tool_calls.parsing.expression_reader import ExpressionReader, ExpressionSyntax
from millrace_router.tool_calls.parsing.lark import literal, pattern
from millrace_router.tool_calls.parsing.parameters import ObjectSchema, check_keywords, resolved
from millrace_router.tool_calls.parsing.text_rule import plain_rule, quoted_rule
from millrace_router.tool_calls.parsing.text_values import text_terminal
from millrace_router.tool_calls.tool import Tool

_KEY = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
_SINGLE_QUOTED = r"""'(?:[^'\\\x00-\x1f]|\\[nrtbf\\'"])*'"""
"""A string as Python writes it, which templates show models."""
_KEYWORDS: Mapping[str, frozenset[str]] = {
    "array": frozenset({"items", "minItems", "maxItems"}),
    "string": frozenset({"pattern", "minLength", "maxLength", "format"}),
    "number": frozenset(
        {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    ),
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
_CHOICES = ("anyOf", "oneOf")
_ANY_KINDS = ("string", "number", "boolean", "null", "array", "object")


class ExpressionGrammar(CallGrammar[ExpressionSyntax]):
    """Makes the rules of one call; their names begin with `rule`."""

    def __init__(
        self, syntax: ExpressionSyntax, rule: str, tool: Tool, marker: Callable[[str], str]
    ) -> None:
        super().__init__(syntax, rule, tool, marker)
        self._by_reference: dict[str, str] = {}

    def rules(self) -> dict[str, str]:
        """Return the rules by name; raises ToolError if the tool is strict, and its schema cannot be kept."""
        syntax = self._syntax
        opener, closer = syntax.edges
        keys = ObjectSchema.of(self._root, self._root, strict=self._tool.strict)
        arguments = self._members(keys, self._argument)
        head = literal(f"{syntax.before_name}{self._tool.name}{opener}")
        call = f"{head} {arguments} {literal(closer)}"
        return {self._rule: call, **self._rules, **self._terminals}

    def _argument(self, key: str) -> str:
        return f"{key} {literal(self._syntax.assign)}"

    def _member(self, key: str) -> str:
        colon = self._syntax.colon
        if self._syntax.has_bare_keys:
            return f"{key} {literal(colon)}"
        return " ".join((literal('"'), key, literal(f'"{colon}')))

    def _members(self, schema: ObjectSchema, written: Callable[[str], str]) -> str:
        """The rule of an object's members in their order, without brackets; each may be missing unless required."""
        comma, members = literal(self._syntax.comma), []
        for name, value in schema.properties.items():
            key = json.dumps(name, ensure_ascii=False)[1:-1] if written == self._member else name
            members.append(self._add(f"{written(literal(key))} {self._value(value)}"))
        extra = rest = ""
        if schema.extra is not False:
            key = self._key_terminal(_KEY, schema.properties)
            extra = self._add(f"{written(key)} {self._value(schema.extra)}")
            rest = self._add(f"({comma} {extra})*")
        firsts = [f"{extra} {rest}"] if extra else []
        is_needed = False
        for name, member in reversed([*zip(schema.properties, members, strict=True)]):
            # What begins with a later member is possible only if this one may be missing.
            is_needed = name in schema.required or (is_needed and bool(firsts))
            firsts = [f"{member} {rest}", *([] if name in schema.required else firsts)]
            times = "" if name in schema.required else "?"
            rest = self._add(f"({comma} {member}){times} {rest}")
        if not firsts:
            return ""
        return f"({' | '.join(firsts)}){'' if is_needed else '?'}"

    def _value(self, schema: object) -> str:
        """Return the rule of a literal that matches a schema."""
        if not isinstance(schema, dict) or not schema:
            return self._any()
        if isinstance(schema.get("$ref"), str):
            return self._referred(schema["$ref"])
        check_keywords(schema)
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, list) and choices:
            return f"({' | '.join(map(self._constant, choices))})"
        for key in _CHOICES:
            if isinstance(some := schema.get(key), list) and some:
                self._check(schema, {key, "type"})
                return f"({' | '.join(map(self._value, some))})"
        kinds = self._kinds(schema)
        if kinds is None:
            self._check(schema, set())
            return self._any()
        types = schema.get("type", sorted(kinds))
        if isinstance(types, str):
            return self._typed(types, schema)
        keywords = frozenset().union(*_KEYWORDS.values())
        self._check(schema, {"type", *keywords})
        # A keyword is about the values of one type.
        return f"({' | '.join(self._typed(one, self._about(one, schema)) for one in types)})"

    def _about(self, kind: str, schema: Schema) -> Schema:
        kept = _KEYWORDS["number" if kind == "integer" else kind]
        return {key: value for key, value in schema.items() if key in kept}

    def _typed(self, kind: str, schema: Schema) -> str:
        """Return the rule of a literal of one type."""
        strict = self._tool.strict
        if self._tool.text is not None:
            return self._input(self._tool.text)
        if kind == "object":
            keys = ObjectSchema.of(schema, self._root, strict=strict)
            return f"{literal('{')} {self._members(keys, self._member)} {literal('}')}"
        if kind == "string" and self._syntax.quote:
            return self._quoted(schema)
        if kind == "string" and not schema.keys() - {"type"}:
            value = self._json({"type": kind})
            return f"({value} | {self._terminal(pattern(_SINGLE_QUOTED))})"
        if kind in {"string", "number", "integer"}:
            return self._json({**schema, "type": kind})
        self._check(schema, {"type", *_KEYWORDS[kind]})
        if kind == "array":
            return self._array(schema)
        if kind == "boolean":
            return f"({self._word('true')} | {self._word('false')})"
        return self._word("null")

    def _input(self, text: Grammar) -> str:
        """Return the rule of the input of a text tool, its one argument."""
        name, quote = f"{self._rule}_text", self._syntax.quote
        if not quote:
            self._rules[name] = quoted_rule(text)
            return f"{literal(chr(34))} {name}"
        mark = self._marker(quote)
        is_token = mark != literal(quote)
        self._rules[name] = plain_rule(text, "" if is_token else quote, quote)
        return f"{mark} {name} {mark}" if is_token else f"{mark} {name}"

    def _array(self, schema: Schema) -> str:
        comma, least, most = (
            literal(self._syntax.comma),
            schema.get("minItems", 0),
            schema.get("maxItems"),
        )
        if most == 0:
            return literal("[]")
        item = self._add(self._value(schema.get("items", True)))
        times = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        more = "" if most == 1 else f" ({comma} {item}){times}"
        return f"{literal('[')} ({item}{more}){'' if least else '?'} {literal(']')}"

    def _quoted(self, schema: Schema) -> str:
        """Return the rule of a string between quotes without escapes."""
        quote = self._syntax.quote
        if self._marker(quote) == literal(quote):
            terminal = text_terminal(schema, quote, quote, strict=self._tool.strict)
            return f"{literal(quote)} {self._terminal(terminal)}"
        terminal = text_terminal(schema, "", quote, strict=self._tool.strict)
        return f"{self._marker(quote)} {self._terminal(terminal)}? {self._marker(quote)}"

    def _constant(self, value: object) -> str:
        """Return the rule of exactly one value."""
        comma = f" {literal(self._syntax.comma)} "
        if isinstance(value, str):
            if not self._syntax.quote:
                return (
                    f"({literal(json.dumps(value, ensure_ascii=False))} | {literal(repr(value))})"
                )
            quote = self._marker(self._syntax.quote)
            return f"{quote} {literal(value)} {quote}" if value else f"{quote} {quote}"
        if isinstance(value, list):
            return f"{literal('[')} {comma.join(map(self._constant, value))} {literal(']')}"
        if isinstance(value, dict):
            members = [
                f"{self._member(literal(json.dumps(key, ensure_ascii=False)[1:-1]))} {self._constant(one)}"
                for key, one in value.items()
            ]
            return f"{literal('{')} {comma.join(members)} {literal('}')}"
        text = json.dumps(value)
        return literal(self._syntax.written.get(text, text))

    def _word(self, text: str) -> str:
        return literal(self._syntax.written[text])

    def _any(self) -> str:
        """Return the rule of any literal."""
        name = f"{self._rule}_any"
        if name not in self._rules:
            self._rules[name] = ""
            self._rules[name] = " | ".join(self._typed(kind, {}) for kind in _ANY_KINDS)
        return name

    def _referred(self, reference: str) -> str:
        """Return the rule of a schema elsewhere, which may refer to itself."""
        name = self._by_reference.get(reference)
        if name is None:
            name = self._by_reference[reference] = f"{self._rule}_ref_{len(self._by_reference)}"
            self._rules[name] = self._value(resolved({"$ref": reference}, self._root))
        return name

    def _check(self, schema: Schema, kept: AbstractSet[str]) -> None:
        """Raise ToolError if the tool is strict, and `schema` has keywords that are not `kept`."""
        refused = sorted(schema.keys() - kept - {"$defs", "definitions"})
        if refused and self._tool.strict:
            raise ToolError(f"this model's format cannot keep `{refused[0]}`")

    def _add(self, rule: str) -> str:
        name = f"{self._rule}_{len(self._rules)}"
        self._rules[name] = self._counted(rule)
        return name


class ExpressionFormat(BlockFormat):
    """A call is an expression."""

    expression: ClassVar[ExpressionSyntax]

    def reader(self, tools: Sequence[Tool], *, has_grammar: bool) -> ExpressionReader:  # noqa: ARG002
        return ExpressionReader(self.expression, tools)

    def _rules_of_call(self, rule: str, tool: Tool) -> dict[str, str]:
        return ExpressionGrammar(self.expression, rule, tool, self._marker).rules()
