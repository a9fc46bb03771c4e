"""Reads grammars as clients write them into the languages of the wire; the checks take no compiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import orjson

from millrace_router.errors import ValidationError
from millrace_router.request.request import Grammar, GrammarKind
from millrace_router.request.schemas import with_closed_objects, with_implied_types

MAX_SOURCE_BYTES = 2**17
"""Bytes of a grammar, or of a schema without blanks; the default limit of the shards is the same."""
MAX_PARTS = 20_000
"""Arrays and objects in the text of a schema, pairs of brackets in any other grammar; more take too long to read."""
MAX_LEVELS = 128
"""Levels of arrays and objects in a schema, of brackets in any other grammar."""

_LEVELS = {ord("("): 1, ord("["): 1, ord("{"): 1, ord(")"): -1, ord("]"): -1, ord("}"): -1}
_CONTAINERS = (dict, list)
_DECIDING = frozenset(
    ("type", "properties", "items", "$ref", "anyOf", "oneOf", "allOf", "not", "enum", "const")
)
"""Keywords, one of which nearly every schema has."""
_NO_BRACKETS = bytes(set(range(256)) - _LEVELS.keys())


@dataclass(frozen=True, slots=True)
class RawGrammar:
    """A grammar as a client wrote it, unchecked; a schema is an object or the JSON text of one."""

    kind: GrammarKind
    value: Any

    def read(self) -> Grammar:
        """Check the grammar, and write a schema as it is meant, without blanks; raises ValidationError."""
        if self.kind is GrammarKind.JSON_SCHEMA:
            return _read_schema(self.value)
        return read_text(self.kind, self.value)

    def check_as_tgi(self) -> None:
        """Raise ValidationError for a schema without `properties` at its top, as TGI does."""
        schema = self.value
        if self.kind is not GrammarKind.JSON_SCHEMA:
            return
        if isinstance(schema, str):
            try:
                schema = orjson.loads(schema)
            except orjson.JSONDecodeError:
                return  # `read` refuses it, with the reason.
        if isinstance(schema, dict) and "properties" not in schema:
            raise _invalid("Grammar must have a 'properties' field")


ANY_OBJECT = RawGrammar(GrammarKind.JSON_SCHEMA, {"type": "object"})
"""Any JSON object."""


def check_schemas(schemas: Sequence[dict[str, Any]]) -> None:
    """Check the size and the parts of all schemas of one request together; raises ValidationError."""
    try:
        source = orjson.dumps(schemas).decode()
    except orjson.JSONEncodeError:
        raise _invalid(f"it must have at most {MAX_LEVELS} levels") from None
    check_size(len(source.encode()))
    _check_parts(source.count("[") + source.count("{"))


def checked_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return `schema` with implied types and closed objects.

    Raises:
        ValidationError: it is nested too deeply, or its parts hold together in too many combinations.

    """
    _check_levels(_levels_of(schema))
    return with_closed_objects(with_implied_types(schema))


def read_text(kind: GrammarKind, source: str) -> Grammar:
    """Check a grammar other than a schema; raises ValidationError."""
    check_size(len(source.encode()))
    brackets = _brackets_of(source)
    _check_parts(len(brackets) // 2)
    _check_levels(max(accumulate(map(_LEVELS.__getitem__, brackets)), default=0))
    return Grammar(kind, source)


def _read_schema(value: object) -> Grammar:
    if isinstance(value, str):
        check_size(len(value.encode()))
        _check_parts(value.count("[") + value.count("{"))
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise _invalid(str(error)) from None
        if not isinstance(value, dict):
            raise _invalid("the schema is not an object")
    if not isinstance(value, dict):
        raise ValidationError("grammar is not supported")
    if isinstance(value.get("schema"), dict) and not value.keys() & _DECIDING:
        raise _invalid("it is an object around a schema, `schema`, and not the schema itself")
    _check_levels(_levels_of(value))
    check_size(len(orjson.dumps(value)))
    source = orjson.dumps(checked_schema(value)).decode()
    check_size(len(source.encode()))
    return Grammar(GrammarKind.JSON_SCHEMA, source, closes=True)


def _brackets_of(source: str) -> bytes:
    """Return the brackets without a backslash before them, found by methods in C, which are fast."""
    bare = source.replace("\\\\", "")
    for bracket in map(chr, _LEVELS):
        bare = bare.replace(f"\\{bracket}", "")
    return bare.encode().translate(None, _NO_BRACKETS)


def _levels_of(value: object) -> int:
    """Count the levels of arrays and objects with a loop: there may be more than the call stack allows."""
    num_levels, level = 0, [value] if isinstance(value, _CONTAINERS) else []
    while level:
        num_levels += 1
        level = [
            part
            for one in level
            for part in (one.values() if isinstance(one, dict) else one)
            if isinstance(part, _CONTAINERS)
        ]
    return num_levels


def check_size(num_bytes: int) -> None:
    """Raise ValidationError for more bytes than a grammar may have."""
    if num_bytes > MAX_SOURCE_BYTES:
        raise _invalid(f"it must have at most {MAX_SOURCE_BYTES} bytes. Given: {num_bytes}")


def _check_parts(num_parts: int) -> None:
    if num_parts > MAX_PARTS:
        raise _invalid(f"it must have at most {MAX_PARTS} pairs of brackets. Given: {num_parts}")


def _check_levels(num_levels: int) -> None:
    if num_levels > MAX_LEVELS:
        raise _invalid(f"it must have at most {MAX_LEVELS} levels. Given: {num_levels}")


def _invalid(reason: str) -> ValidationError:
    return ValidationError(f"grammar is not valid: {reason}")
