"""What a chat template expects of messages, as far as its syntax tree tells."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jinja2 import nodes

_SHORT_ID = re.compile(r"length\s*[!=]=\s*9\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateShape:
    """Whatever it tells not of is taken to be text."""

    names_tools: bool = False
    """Whether it tells the model of tools."""
    names_tool_calls: bool = False
    """Whether it writes the calls of earlier turns by itself."""
    loops_over_content: bool = False
    """Whether content may be a list of parts."""
    asks_for_string: bool = False
    """Whether it tells text from a list of parts."""
    asks_for_none: bool = False
    """Whether it tells a turn of calls alone by its content of None."""
    names_developer: bool = False
    """Whether it knows the role `developer`."""
    has_short_ids: bool = False
    """Whether it takes no ids of calls but those of nine characters, as Mistral's do."""

    @classmethod
    def of(cls, tree: nodes.Template, source: str) -> TemplateShape:
        """Read a parsed template."""
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
            asks_for_string=any(
                test.name == "string" and content.has(test.node)
                for test in tree.find_all(nodes.Test)
            ),
            asks_for_none=any(
                test.name == "none" and content.has(test.node) for test in tree.find_all(nodes.Test)
            ),
            names_developer="developer" in constants,
            has_short_ids=_SHORT_ID.search(source) is not None,
        )


class _Content:
    """Which expressions stand for the content of a message: by its key, or by a name that was given it."""

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
        """Whether `node` is content, or a part of it."""
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
