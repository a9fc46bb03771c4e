"""Grammars in the bodies of requests, in the forms of TGI, OpenAI, vLLM, SGLang and llama.cpp.

They allow more than TGI: a schema needs no `properties` at its top, `json_object` needs no schema, and there is `lark`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import TypeAliasType

from millrace_router.api.body.fields import RequestModel
from millrace_router.request.grammar import ANY_OBJECT, RawGrammar
from millrace_router.request.request import GrammarKind


class JsonGrammar(RequestModel):
    """JSON as a schema describes it; the schema is an object or the text of one."""

    type: Literal["json", "json_object"]
    value: Any = None
    """The schema; None for any object if `type` is `json_object`."""

    def raw(self) -> RawGrammar:
        if self.value is None and self.type == "json_object":
            return ANY_OBJECT
        return RawGrammar(GrammarKind.JSON_SCHEMA, self.value)


class JsonSchemaConfig(RequestModel):
    """A schema that may have a name, which changes nothing."""

    name: str | None = None
    schema_: Any = Field(alias="schema")


class JsonSchemaGrammar(RequestModel):
    """JSON as a schema describes it."""

    type: Literal["json_schema"]
    value: JsonSchemaConfig

    def raw(self) -> RawGrammar:
        return RawGrammar(GrammarKind.JSON_SCHEMA, self.value.schema_)


class RegexGrammar(RequestModel):
    """A regular expression that the whole text matches."""

    type: Literal["regex"]
    value: str

    def raw(self) -> RawGrammar:
        return RawGrammar(GrammarKind.REGEX, self.value)


class LarkGrammar(RequestModel):
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


class LoraxFormat(RequestModel):
    """LoRAX's `response_format`: JSON, by a schema or any object."""

    type: Literal["json_object", "json_schema"]
    schema_: Any = Field(alias="schema", default=None)
    """The schema; None for any object."""

    def raw(self) -> RawGrammar:
        return raw_schema(self.schema_)


class TextFormat(RequestModel):
    """Any text."""

    type: Literal["text"]

    def raw(self) -> None:
        """Return no grammar."""


class ResponseJsonSchema(RequestModel):
    """A schema as OpenAI has it; the generated text is valid with and without `strict`."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Any = Field(alias="schema", default=None)
    """The schema; None for any object."""


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

    def raw(self) -> RawGrammar:
        """Translate; OpenAI's place beats TGI's."""
        config = self.json_schema or self.value
        assert config is not None
        return raw_schema(config.schema_)


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
