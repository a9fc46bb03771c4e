"""`unevaluatedProperties` as `additionalProperties`, which llguidance knows.

Both say which other properties an object may have; the first also counts those that `allOf`, `$ref` and the like list.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from millrace_shard.structured_output.references import References, Schema

CONDITIONAL = frozenset(("if", "dependentSchemas", "$dynamicRef"))
"""Keywords under which it depends on the value which properties a schema evaluates."""


class Evaluated(NamedTuple):
    """The properties that a schema evaluates in an object that matches it, in the order of the schema."""

    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    is_all: bool = False

    @property
    def key(self) -> tuple[frozenset[str], frozenset[str], bool]:
        return frozenset(self.names), frozenset(self.patterns), self.is_all

    def joined(self, other: Evaluated | None) -> Evaluated | None:
        """Return what both evaluate together; None if `other` is."""
        if other is None:
            return None
        names = dict.fromkeys(self.names + other.names)
        patterns = dict.fromkeys(self.patterns + other.patterns)
        return Evaluated(tuple(names), tuple(patterns), self.is_all or other.is_all)


def mend_unevaluated(parts: Sequence[Schema], references: References) -> None:
    """Write `unevaluatedProperties` as `additionalProperties` where it does not depend on the value what is evaluated.

    Elsewhere it stays, and llguidance refuses it.
    """
    several = [part for part in parts if "unevaluatedProperties" in part]
    # No part is changed before all are read: one may be within another.
    for part, evaluated in [(part, _evaluated_beside(part, references)) for part in several]:
        if evaluated is None:
            continue
        others = part.pop("unevaluatedProperties")
        if evaluated.is_all:
            continue
        for word, keys in (
            ("properties", evaluated.names),
            ("patternProperties", evaluated.patterns),
        ):
            if keys:
                own = part.get(word, {})
                part[word] = {**own, **{key: {} for key in keys if key not in own}}
        part["additionalProperties"] = others


def _evaluated_beside(part: Schema, references: References) -> Evaluated | None:
    others = {key: value for key, value in part.items() if key != "unevaluatedProperties"}
    return _evaluated(others, references, references.target(part), frozenset({id(part)}))


def _evaluated(
    schema: Schema, references: References, target: object, seen: AbstractSet[int]
) -> Evaluated | None:
    """What `schema`, which refers to `target`, evaluates; None if that depends on the value."""
    own = [schema.get(word, {}) for word in ("properties", "patternProperties")]
    if schema.keys() & CONDITIONAL or not all(isinstance(one, dict) for one in own):
        return None
    is_all = bool(schema.keys() & {"additionalProperties", "unevaluatedProperties"})
    several = schema.get("allOf", [])
    parts = [
        _evaluated_by(one, references, seen)
        for one in [*(several if isinstance(several, list) else []), target]
    ]
    for word in ("anyOf", "oneOf"):
        options = schema.get(word, [])
        alike = {
            evaluated and evaluated.key: evaluated
            for one in (options if isinstance(options, list) else [])
            if _may_be_object(references.resolved(one)) and references.is_productive(one)
            for evaluated in [_evaluated_by(one, references, seen)]
        }
        parts += alike.values() if len(alike) < 2 else [None]
    evaluated: Evaluated | None = Evaluated(tuple(own[0]), tuple(own[1]), is_all)
    for one in parts:
        evaluated = None if evaluated is None else evaluated.joined(one)
    return evaluated


def _evaluated_by(
    schema: object, references: References, seen: AbstractSet[int]
) -> Evaluated | None:
    if not isinstance(schema, dict) or id(schema) in seen:
        return Evaluated()
    return _evaluated(schema, references, references.target(schema), seen | {id(schema)})


def _may_be_object(schema: object) -> bool:
    kinds = schema.get("type", "object") if isinstance(schema, dict) else "object"
    return "object" in kinds if isinstance(kinds, str | list) else True
