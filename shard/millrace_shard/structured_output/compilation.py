"""Compiles a grammar: names the place of a fault in a schema, and does without it in a schema that is lenient."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from time import process_time
from typing import Any

from millrace_proto.sequence import Grammar, GrammarKind
from millrace_shard.structured_output.grammar_source import (
    GrammarInvalid,
    lark_of,
    map_schemas,
)
from millrace_shard.structured_output.matcher import Matcher
from millrace_shard.structured_output.references import LISTS, MAPS, SINGLES, Schema
from millrace_shard.structured_output.vocabulary import Vocabulary

DEFINITIONS = ("$defs", "definitions")
SEARCH_SECONDS = 0.5
"""CPU time of the search for faults in one schema; a grammar may take four times as long."""
MAX_FAULTS = 16
"""Faults of one schema that are left out; beyond them it allows any object."""

HINTS = {
    "pattern": "regex",
    "type": "invalid type",
    "$ref": "pointer",
    "oneOf": "oneof",
    "enum": "anyof is empty",
}
"""What messages of llguidance about a keyword have, if they do not quote it."""

Slot = tuple[Any, Any, str]
"""A dict or list, the key or index of a schema in it, and the pointer from the schema around it."""


def compiled(grammar: Grammar, vocabulary: Vocabulary) -> tuple[str, Matcher]:
    """The grammar as Lark, and its matcher.

    A schema within Lark that is `lenient`, such as the parameters of a tool, loses the parts that cannot be compiled.

    Raises GrammarInvalid, with the place of the fault if the grammar is a schema.
    """
    lark = lark_of(grammar)
    try:
        return lark, Matcher.of(lark, vocabulary)
    except GrammarInvalid as error:
        faults = _Faults(vocabulary)
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            raise GrammarInvalid(faults.located(json.loads(grammar.source), str(error))) from None
        if grammar.kind is not GrammarKind.LARK:
            raise
        mended = map_schemas(grammar.source, faults.mended)
        if mended == grammar.source:
            raise
    lark = lark_of(replace(grammar, source=mended))
    return lark, Matcher.of(lark, vocabulary)


class _Faults:
    """Looks for the smallest parts of schemas that do not compile by themselves."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._until = process_time() + SEARCH_SECONDS

    def located(self, schema: Schema, reason: str) -> str:
        """`reason`, behind the place of the part that has this fault."""
        path = self._path(schema, reason)
        part = path[-1][0][path[-1][1]] if path else schema
        pointers = [pointer for _, _, pointer in path] + [
            f"/{name}" for name in _keyword(part, reason)
        ]
        return f"#{''.join(pointers)}: {reason}"

    def mended(self, schema: Schema) -> str | None:
        """The schema without its faults; None if it has none, or is not lenient."""
        guidance = schema.get("x-guidance")
        reason = self._fault(schema)
        if reason is None or not isinstance(guidance, dict) or guidance.get("lenient") is not True:
            return None
        for _ in range(MAX_FAULTS):
            path = self._path(schema, reason)
            if not path or process_time() > self._until:
                break
            container, key, _ = path[-1]
            container[key] = {}
            reason = self._fault(schema)
            if reason is None:
                return json.dumps(schema)
        return json.dumps({"type": "object", "x-guidance": guidance})

    def _path(self, schema: Schema, reason: str) -> list[Slot]:
        """The way to the smallest part that has this fault by itself; empty if it is the whole schema."""
        around = {name: schema[name] for name in (*DEFINITIONS, "x-guidance") if name in schema}
        path, part = list[Slot](), schema
        while (slot := self._with_fault(part, around, reason)) is not None:
            path.append(slot)
            part = slot[0][slot[1]]
        return path

    def _with_fault(self, schema: Schema, around: Schema, reason: str) -> Slot | None:
        """A part directly within `schema` that has this fault, else one that has any."""
        other: Slot | None = None
        for container, key, pointer in _slots(schema):
            part = container[key]
            if not isinstance(part, dict) or process_time() > self._until:
                continue
            fault = self._fault({**around, **part})
            if fault == reason:
                return container, key, pointer
            if fault is not None and other is None:
                other = container, key, pointer
        return other

    def _fault(self, schema: Schema) -> str | None:
        """Why `schema` does not compile; None if it does."""
        source = f"start: %json {json.dumps(schema)}"
        try:
            Matcher.of(lark_of(Grammar(GrammarKind.LARK, source)), self._vocabulary)
        except GrammarInvalid as error:
            return str(error)
        return None


def _keyword(part: Schema, reason: str) -> list[str]:
    """The keyword of `part` that `reason` names, if there is one."""
    named = [name for name in part if f'"{name}"' in reason or f"'{name}'" in reason]
    hinted = [name for name, hint in HINTS.items() if name in part and hint in reason.lower()]
    return (named or hinted)[:1]


def _slots(schema: Schema) -> Iterator[Slot]:
    """The places of the schemas directly within `schema`: definitions first, since others refer to them."""
    for name in sorted(schema, key=lambda name: name not in DEFINITIONS):
        value = schema[name]
        if isinstance(value, dict) and name in MAPS:
            yield from ((value, key, f"/{name}/{key}") for key in value)
        elif isinstance(value, list) and name in LISTS:
            yield from ((value, index, f"/{name}/{index}") for index in range(len(value)))
        elif name in SINGLES:
            yield schema, name, f"/{name}"
