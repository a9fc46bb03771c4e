"""The form of messages that a chat template expects, as its syntax tree shows."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jinja2 import nodes

_COUNTS_CALLS = re.compile(r"(?:in\s+\w+\.tool_calls|tool_calls\s*\|\s*(?:length|count))")
_SHORT_ID = re.compile(r"length\s*[!=]=\s*9\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateShape:
    """Features of a chat template. Without a feature, messages are converted to plain text."""

    names_tools: bool = False
    """Whether it renders tools."""
    names_tool_calls: bool = False
    """Whether it renders calls of earlier messages."""
    loops_over_content: bool = False
    """Whether content may be a list of parts."""
    tests_for_string: bool = False
    """Whether it tests content for being a string, so that both forms are valid."""
    tests_for_none: bool = False
    """Whether it tests content for None, in a message with calls alone."""
    names_developer: bool = False
    """Whether it has the role `developer`."""
    has_short_ids: bool = False
    """Whether call ids must have nine characters, as in Mistral's templates."""
    has_counted_ids: bool = False
    """Whether call ids have the name and a number, as in Kimi's templates."""
    has_one_call: bool = False
    """Whether it renders the first call of a message and silently drops the others, as gpt-oss' does."""
    adds_arguments: bool = False
    """Whether it adds a call's arguments to text, so that they must be text, as in DeepSeek's templates."""

    has_thought_parts: bool = False
    """Whether a thought may be a part of the content, as in Mistral's templates."""

    @classmethod
    def of(cls, tree: nodes.Template, source: str) -> TemplateShape:
        """Inspect a parsed template."""
        constants = {
            node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)
        }
        attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
        content = _Content(tree)
        return cls(
            names_tools=any(
                node.name == "tools" and node.ctx == "load" for node in tree.find_all(nodes.Name)
            ),
            names_tool_calls="tool_calls" in constants | attributes,
            loops_over_content=any(content.has(loop.iter) for loop in tree.find_all(nodes.For)),
            tests_for_string=any(
                test.name == "string" and content.has(test.node)
                for test in tree.find_all(nodes.Test)
            ),
            tests_for_none=any(
                test.name == "none" and content.has(test.node) for test in tree.find_all(nodes.Test)
            ),
            names_developer="developer" in constants,
            has_thought_parts="thinking" in constants and "[THINK]" in source,
            has_short_ids=_SHORT_ID.search(source) is not None,
            has_counted_ids="<|tool_call_begin|>" in source,
            has_one_call="tool_calls[0]" in source and not _COUNTS_CALLS.search(source),
            adds_arguments=_adds_arguments(tree),
        )


def _adds_arguments(tree: nodes.Template) -> bool:
    """Whether arguments are an operand of text, and nothing tells that they may be an object."""
    operands: list[nodes.Node] = []
    for binary in tree.find_all(nodes.Add):
        operands += [binary.left, binary.right]
    for concat in tree.find_all(nodes.Concat):
        operands += concat.nodes
    for output in tree.find_all(nodes.Output):
        operands += output.nodes
    others: list[nodes.Node] = [test.node for test in tree.find_all(nodes.Test)]
    others += [filtered.node for filtered in tree.find_all(nodes.Filter) if filtered.node]
    others += [loop.iter for loop in tree.find_all(nodes.For)]
    return any(map(_is_arguments, operands)) and not any(map(_is_arguments, others))


def _is_arguments(node: nodes.Node) -> bool:
    match node:
        case nodes.Getattr(attr="arguments"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="arguments")):
            return True
    return False


class _Content:
    """Finds expressions for a message's content: by key, or by a variable that it was assigned to."""

    def __init__(self, tree: nodes.Template) -> None:
        self._names: set[str] = set()
        macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        assignments = list(tree.find_all(nodes.Assign))
        calls = list(tree.find_all(nodes.Call))
        num_known = -1
        while num_known < len(self._names):
            num_known = len(self._names)
            for assignment in assignments:
                if isinstance(assignment.target, nodes.Name) and self.has(assignment.node):
                    self._names.add(assignment.target.name)
            for call in calls:
                if isinstance(call.node, nodes.Name) and call.node.name in macros:
                    self._give(macros[call.node.name], call)

    def _give(self, macro: nodes.Macro, call: nodes.Call) -> None:
        for parameter, argument in zip(macro.args, call.args, strict=False):
            if self.has(argument):
                self._names.add(parameter.name)

    def has(self, node: nodes.Node) -> bool:
        """Whether `node` is the content or a part of it."""
        match node:
            case nodes.Name():
                return node.name in self._names
            case nodes.Getattr():
                return node.attr == "content"
            case nodes.Getitem(arg=nodes.Const() as key):
                return bool(key.value == "content")
            case nodes.Getitem(arg=nodes.Slice()):
                return self.has(node.node)
            case nodes.Filter(node=nodes.Expr() as filtered):
                return self.has(filtered)
            case nodes.CondExpr():
                return self.has(node.expr1) or (node.expr2 is not None and self.has(node.expr2))
        return False
