"""What the answer has to match, in TGI's forms and OpenAI's; each is one of the three languages of the wire.

Wider than TGI: a schema needs no `properties` at its top, `json_object` needs no schema, and there is `lark`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, model_validator
from typing_extensions import TypeAliasType

from millrace_router.errors import ValidationError
from millrace_router.request.fields import RequestModel
from millrace_router.request.implied_types import with_implied_types
from millrace_router.request.request import Grammar, GrammarKind

MAX_SOURCE_BYTES = 2**17
"""Bytes of a grammar, or of a schema without blanks; the default limit of the shards is the same."""
MAX_PARTS = 20_000
"""Arrays and objects in the text of a schema, pairs of brackets in any other grammar: reading more takes too long."""
MAX_LEVELS = 128
"""Levels of arrays and objects in a schema, of brackets in any other grammar."""
ANY_OBJECT = '{"type":"object"}'
"""The schema that stands in for none."""

_LEVELS = {ord("("): 1, ord("["): 1, ord("{"): 1, ord(")"): -1, ord("]"): -1, ord("}"): -1}
_CONTAINERS = (dict, list)
_NO_BRACKETS = bytes(set(range(256)) - _LEVELS.keys())


class JsonGrammar(RequestModel):
    """JSON as a schema describes it; the schema is an object or the text of one."""

    type: Literal["json", "json_object"]
    value: Any = None
    """None stands for any object, if that is what `type` says."""

    def resolved(self) -> Grammar:
        """Raise ValidationError if there is no schema in it."""
        if self.value is None and self.type == "json_object":
            return Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT)
        return _of_schema(self.value)


class JsonSchemaConfig(RequestModel):
    """A schema that may have a name, which changes nothing."""

    name: str | None = None
    schema_: Any = Field(alias="schema")


class JsonSchemaGrammar(RequestModel):
    """JSON as a schema describes it."""

    type: Literal["json_schema"]
    value: JsonSchemaConfig

    def resolved(self) -> Grammar:
        """Raise ValidationError if it is no schema."""
        return _of_schema(self.value.schema_)


class RegexGrammar(RequestModel):
    """A regular expression that the whole text matches."""

    type: Literal["regex"]
    value: str

    def resolved(self) -> Grammar:
        """Raise ValidationError if it is too long or nested too deeply."""
        return _of_text(GrammarKind.REGEX, self.value)


class LarkGrammar(RequestModel):
    """A context-free grammar in Lark's syntax; not in TGI."""

    type: Literal["lark", "ebnf"]
    value: str

    def resolved(self) -> Grammar:
        """Raise ValidationError if it is too long or nested too deeply."""
        return _of_text(GrammarKind.LARK, self.value)


GrammarType = TypeAliasType(
    "GrammarType",
    Annotated[
        JsonGrammar | JsonSchemaGrammar | RegexGrammar | LarkGrammar, Field(discriminator="type")
    ],
)
"""`grammar` of the native routes."""


class TextFormat(RequestModel):
    """Any text."""

    type: Literal["text"]


class ResponseJsonSchema(RequestModel):
    """A schema as OpenAI has it; with or without `strict`, what is generated is valid."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Any = Field(alias="schema", default=None)
    """None stands for any object."""


class SchemaFormat(RequestModel):
    """A schema in OpenAI's place, `json_schema`, or in TGI's, `value`."""

    type: Literal["json_schema"]
    json_schema: ResponseJsonSchema | None = None
    value: JsonSchemaConfig | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> SchemaFormat:
        if self.json_schema is None and self.value is None:
            raise ValueError("`json_schema` is needed")
        return self

    def as_grammar(self) -> JsonGrammar:
        """Translate; OpenAI's place beats TGI's."""
        config = self.json_schema or self.value
        assert config is not None
        return JsonGrammar(type="json_object", value=config.schema_)


ResponseFormat = TypeAliasType(
    "ResponseFormat",
    Annotated[
        TextFormat | JsonGrammar | SchemaFormat | RegexGrammar | LarkGrammar,
        Field(discriminator="type"),
    ],
)
"""`response_format` of the OpenAI routes."""


def grammar_of(response_format: ResponseFormat | None) -> GrammarType | None:
    """What a response format means as the `grammar` of a native request."""
    if response_format is None or isinstance(response_format, TextFormat):
        return None
    if isinstance(response_format, SchemaFormat):
        return response_format.as_grammar()
    return response_format


def grammar_type(grammar: Grammar) -> GrammarType:
    """Write a grammar in TGI's form."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return JsonGrammar(type="json", value=grammar.source)
        case GrammarKind.REGEX:
            return RegexGrammar(type="regex", value=grammar.source)
        case GrammarKind.LARK:
            return LarkGrammar(type="lark", value=grammar.source)


def check_as_tgi(grammar: GrammarType) -> None:
    """Raise ValidationError for a schema that TGI would refuse: it wants `properties` at the top.

    What is no schema at all is left to be told by `resolved`, which takes too long here.
    """
    if not isinstance(grammar, JsonGrammar | JsonSchemaGrammar):
        return
    if _lacks_properties(grammar):
        raise _invalid("Grammar must have a 'properties' field")


def check_schemas(schemas: Sequence[dict[str, Any]]) -> None:
    """Raise ValidationError if schemas that go together are longer, or have more parts, than is worth a look."""
    try:
        source = orjson.dumps(schemas).decode()
    except orjson.JSONEncodeError:
        raise _invalid(f"it must have at most {MAX_LEVELS} levels") from None
    _check_size(source)
    _check_parts(source.count("[") + source.count("{"))


def checked_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Say in `schema` what its users imply; raises ValidationError if it is nested too deeply."""
    _check_levels(_levels_of(schema))
    return with_implied_types(schema)


def _lacks_properties(grammar: JsonGrammar | JsonSchemaGrammar) -> bool:
    value = grammar.value.schema_ if isinstance(grammar, JsonSchemaGrammar) else grammar.value
    if value is None:
        return grammar.type == "json_object"
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            return False
    return isinstance(value, dict) and "properties" not in value


def _of_schema(value: object) -> Grammar:
    """Read a schema, which is an object or the text of one; raises ValidationError, in TGI's words where it has any."""
    if isinstance(value, str):
        _check_size(value)
        _check_parts(value.count("[") + value.count("{"))
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise _invalid(str(error)) from None
        if not isinstance(value, dict):
            raise _invalid("the schema is not an object")
    if not isinstance(value, dict):
        raise ValidationError("grammar is not supported")
    source = orjson.dumps(checked_schema(value)).decode()
    _check_size(source)
    return Grammar(GrammarKind.JSON_SCHEMA, source)


def _of_text(kind: GrammarKind, source: str) -> Grammar:
    _check_size(source)
    brackets = _brackets_of(source)
    _check_parts(len(brackets) // 2)
    _check_levels(max(accumulate(map(_LEVELS.__getitem__, brackets)), default=0))
    return Grammar(kind, source)


def _brackets_of(source: str) -> bytes:
    """The brackets that no backslash makes a character of, found by methods in C, which are fast."""
    bare = source.replace("\\\\", "")
    for bracket in map(chr, _LEVELS):
        bare = bare.replace(f"\\{bracket}", "")
    return bare.encode().translate(None, _NO_BRACKETS)


def _levels_of(value: object) -> int:
    """Levels of arrays and objects, taken one at a time, since there may be more than calls can be nested."""
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


def _check_size(source: str) -> None:
    num_bytes = len(source.encode())
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
