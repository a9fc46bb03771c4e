"""The grammar of a call whose parameters are in tags."""

from __future__ import annotations

import json
from collections.abc import Callable

from millrace_router.errors import ToolError
from millrace_router.request.request import Grammar
from millrace_router.tool_calls.arguments_schema import Schema
from millrace_router.tool_calls.free_text.text_rule import plain_rule
from millrace_router.tool_calls.lark import escaped, json_value, literal, pattern
from millrace_router.tool_calls.parameters.keywords import check_keywords
from millrace_router.tool_calls.parameters.kinds import kinds_of, resolved
from millrace_router.tool_calls.parameters.object_schema import ObjectSchema, schema_of, within
from millrace_router.tool_calls.parameters.text_grammar import text_terminal
from millrace_router.tool_calls.tool import Tool
from millrace_router.tool_calls.xml.xml_syntax import XmlSyntax

_KEY = r'[^<>"=\s]{1,64}'
_UNION = frozenset({"type", "anyOf", "oneOf"})


class XmlGrammar:
    """Makes the rules of one call; their names begin with `rule`."""

    def __init__(
        self, syntax: XmlSyntax, rule: str, tool: Tool, marker: Callable[[str], str]
    ) -> None:
        """`marker` makes the rule of a tag, which may be a token. Raises as `arguments_schema` does."""
        self._syntax = syntax
        self._rule = rule
        self._tool = tool
        self._marker = marker
        self._root: Schema = schema_of(tool)
        self._terminals: dict[str, str] = {}
        self._inputs: dict[str, str] = {}
        """The rule of a text tool's input."""

    def rules(self) -> dict[str, str]:
        """Return the rules by name; raises ToolError if the tool is strict, and its schema cannot be kept."""
        syntax, strict = self._syntax, self._tool.strict
        schema = ObjectSchema.of(self._root, self._root, strict=strict)
        parts = [self._texts(syntax.before_name, self._tool.name, syntax.behind_name)]
        parts.append(self._texts(syntax.spacing))
        for name, value in schema.properties.items():
            part = f"{self._key(literal(name))} {self._value(value)}"
            parts.append(part if name in schema.required else f"({part})?")
        if schema.extra is not False:
            others = [f"~{pattern(escaped(name))}" for name in schema.properties]
            key = self._terminal(" & ".join([pattern(_KEY), *others]))
            parts.append(f"({self._key(key)} {self._value(schema.extra)})*")
        if not syntax.end_is_closer:
            parts.append(self._texts(syntax.end))
        return {self._rule: " ".join(filter(None, parts)), **self._inputs, **self._terminals}

    def _texts(self, *texts: str) -> str:
        return " ".join(self._marker(text) for text in texts if text)

    def _key(self, key: str) -> str:
        """The rule of a key and all texts around it."""
        syntax = self._syntax
        between = syntax.spacing if syntax.before_value else ""
        behind = (syntax.behind_key, between, syntax.before_value, syntax.padding)
        return f"{self._texts(syntax.before_key)} {key} {self._texts(*behind)}"

    def _value(self, schema: object) -> str:
        """The rule of a value and what is behind it."""
        syntax, strict = self._syntax, self._tool.strict
        kinds = kinds_of(schema, self._root)
        behind = self._texts(syntax.padding, syntax.behind_value, syntax.spacing)
        if self._tool.text is not None:
            return self._input(self._tool.text)
        found = resolved(schema, self._root)
        known = found if isinstance(found, dict) else {}
        check_keywords(known)
        if kinds is not None and "string" not in kinds:
            return f"{json_value(within(schema, self._root, strict=strict))} {behind}"
        choices = [known["const"]] if "const" in known else known.get("enum")
        if choices:
            return f"({' | '.join(literal(_written(one)) for one in choices)}) {behind}"
        is_text = kinds == frozenset({"string"})
        if not is_text and strict and known.keys() - _UNION:
            raise ToolError("this model's format cannot keep keywords of a value of several types")
        return self._text(known if is_text else {})

    def _input(self, text: Grammar) -> str:
        """The rule of a text tool's input and what is behind it."""
        name, mark, padding = f"{self._rule}_text", self._syntax.behind_value, self._syntax.padding
        is_token = self._marker(mark) != literal(mark)
        self._inputs[name] = plain_rule(text, padding if is_token else f"{padding}{mark}", mark)
        return f"{name} {self._texts(mark if is_token else '', self._syntax.spacing)}"

    def _text(self, schema: Schema) -> str:
        """The rule of a string and what is behind it."""
        syntax, strict = self._syntax, self._tool.strict
        mark, padding = syntax.behind_value, syntax.padding
        if self._marker(mark) != literal(mark):
            terminal = self._terminal(text_terminal(schema, padding, mark, strict=strict))
            return f"{terminal}? {self._texts(mark, syntax.spacing)}"
        terminal = text_terminal(schema, f"{padding}{mark}", mark, strict=strict)
        return f"{self._terminal(terminal)} {self._texts(syntax.spacing)}"

    def _terminal(self, terminal: str) -> str:
        name = f"{self._rule}_{len(self._terminals)}".upper()
        self._terminals[name] = terminal
        return name


def _written(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
