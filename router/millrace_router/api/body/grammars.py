"""Grammars in the bodies of requests, in the forms of TGI, OpenAI, vLLM, SGLang and llama.cpp.

They allow more than TGI: a schema needs no `properties` at its top, `json_object` needs no schema, and there is `lark`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, model_validator
from typing_extensions import TypeAliasType

from millrace_router.api.body.fields import RequestModel, names_of
from millrace_router.request.grammar import ANY_OBJECT, RawGrammar
from millrace_router.request.request import GrammarKind

PLACES = frozenset(
    (
        *("schema", "json_schema", "jsonSchema", "response_schema", "value", "json", "guided_json"),
        *("regex", "regex_schema", "pattern", "choice", "grammar", "lark", "ebnf"),
    )
)
"""Where one server or another has a grammar."""
KEYWORDS = frozenset(
    (
        *("type", "properties", "required", "additionalProperties", "items", "prefixItems"),
        *("$ref", "$defs", "definitions", "anyOf", "oneOf", "allOf", "enum", "const"),
        *("pattern", "format", "minimum", "maximum", "minLength", "maxLength"),
    )
)
"""Keys of a JSON Schema, which an object that wraps a schema does not have."""


class FormOfText(RequestModel):
    """A form of the answer; a grammar in another server's place is refused, since it would be lost."""

    @model_validator(mode="before")
    @classmethod
    def _has_grammars_in_place(cls, value: object) -> object:
        if isinstance(value, dict):
            places = names_of(cls)
            filled = [
                name
                for name in sorted((PLACES | KEYWORDS) & value.keys())
                if value[name] is not None
            ]
            for name in filled:
                if name not in places:
                    raise _not_read(name, places)
            grammars = [name for name in filled if name in PLACES]
            if len({places[name] for name in grammars}) < len(grammars):
                named = " and ".join(f"`{one}`" for one in grammars)
                raise ValueError(f"{named} exclude each other")
        return value


class NamedSchema(RequestModel):
    """An object around a schema; a schema in its place is refused, since it would be lost."""

    @model_validator(mode="before")
    @classmethod
    def _is_around_schema(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("schema") is None:
            places = names_of(cls)
            for name in sorted(value.keys() - places.keys()):
                if name in KEYWORDS or isinstance(value[name], dict):
                    raise _not_read(name, places)
        return value


def _not_read(name: str, places: Collection[str]) -> ValueError:
    """Return the error for a grammar, or a part of one, in an object that reads others, or none."""
    known = [f"`{place}`" for place in sorted({*PLACES, "format"}.intersection(places))]
    reason = f"it takes {' and '.join(known)}" if known else "it takes no grammar"
    return ValueError(f"`{name}` is not read in this form: {reason}")


class JsonGrammar(FormOfText):
    """JSON as a schema describes it; the schema is an object or the text of one."""

    type: Literal["json", "json_object"]
    value: Any = Field(validation_alias=AliasChoices("value", "schema"), default=None)
    """The schema, also as `schema`; None for any object if `type` is `json_object`."""

    def raw(self) -> RawGrammar:
        if self.value is None and self.type == "json_object":
            return ANY_OBJECT
        return RawGrammar(GrammarKind.JSON_SCHEMA, self.value)


class JsonSchemaConfig(NamedSchema):
    """A schema that may have a name, which changes nothing."""

    name: str | None = None
    schema_: Any = Field(alias="schema")


class JsonSchemaGrammar(FormOfText):
    """JSON as a schema describes it."""

    type: Literal["json_schema"]
    value: JsonSchemaConfig

    def raw(self) -> RawGrammar:
        return RawGrammar(GrammarKind.JSON_SCHEMA, self.value.schema_)


class RegexGrammar(FormOfText):
    """A regular expression that the whole text matches."""

    type: Literal["regex"]
    value: str

    def raw(self) -> RawGrammar:
        return RawGrammar(GrammarKind.REGEX, self.value)


class LarkGrammar(FormOfText):
    """A context-free grammar in Lark's syntax; not in TGI."""

    type: Literal["lark", "ebnf"]
    value: str

    def raw(self) -> RawGrammar:
        return RawGrammar(GrammarKind.LARK, self.value)


GrammarType = TypeAliasType(
    "GrammarType",
    Annotated[
        JsonGrammar | JsonSchemaGrammar | RegexGrammar | LarkGrammar, Field(discriminator="type")
    ],
)
"""`grammar` of the native routes."""


class LoraxFormat(FormOfText):
    """LoRAX's `response_format`: JSON, by a schema or any object."""

    type: Literal["json_object", "json_schema"]
    schema_: Any = Field(alias="schema", default=None)
    """The schema; None for any object."""

    def raw(self) -> RawGrammar:
        return raw_schema(self.schema_)


class TextFormat(FormOfText):
    """Any text."""

    type: Literal["text"]

    def raw(self) -> None:
        """Return no grammar."""


class ResponseJsonSchema(NamedSchema):
    """A schema as OpenAI has it; the generated text is valid with and without `strict`."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Any = Field(alias="schema", default=None)
    """The schema; None for any object."""


class SchemaFormat(FormOfText):
    """A schema in OpenAI's place, `json_schema`, in TGI's, `value`, or in the Responses API's, `schema`."""

    type: Literal["json_schema"]
    json_schema: ResponseJsonSchema | None = None
    value: JsonSchemaConfig | None = None
    schema_: Any = Field(alias="schema", default=None)

    @model_validator(mode="after")
    def _has_schema(self) -> SchemaFormat:
        if self.json_schema is None and self.value is None and self.schema_ is None:
            raise ValueError("`json_schema` is needed")
        return self

    def raw(self) -> RawGrammar:
        """Translate; OpenAI's place beats TGI's, which beats the last."""
        config = self.json_schema or self.value
        return raw_schema(self.schema_ if config is None else config.schema_)


ResponseFormat = TypeAliasType(
    "ResponseFormat",
    Annotated[
        TextFormat | JsonGrammar | SchemaFormat | RegexGrammar | LarkGrammar,
        Field(discriminator="type"),
    ],
)
"""`response_format` of the OpenAI routes."""


def raw_schema(schema: object) -> RawGrammar:
    """Return the grammar of a schema in OpenAI's form, in which None means any object."""
    return ANY_OBJECT if schema is None else RawGrammar(GrammarKind.JSON_SCHEMA, schema)
