"""Grammars in the bodies of requests, in the forms of TGI, OpenAI, vLLM, SGLang and llama.cpp.

They allow more than TGI: a schema needs no `properties` at its top, `json_object` needs no schema, and there is `lark`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import TypeAliasType

from millrace_router.api.body.fields import Place, RequestModel
from millrace_router.errors import ValidationError
from millrace_router.request.grammar import ANY_OBJECT, RawGrammar
from millrace_router.request.request import GrammarKind


class JsonGrammar(RequestModel):
    """JSON as a schema describes it; the schema is an object or the text of one."""

    type: Literal["json", "json_object"]
    value: Any = None
    """None stands for any object if `type` is `json_object`."""

    def raw(self) -> RawGrammar:
        """Translate."""
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
        """Translate."""
        return RawGrammar(GrammarKind.JSON_SCHEMA, self.value.schema_)


class RegexGrammar(RequestModel):
    """A regular expression that the whole text matches."""

    type: Literal["regex"]
    value: str

    def raw(self) -> RawGrammar:
        """Translate."""
        return RawGrammar(GrammarKind.REGEX, self.value)


class LarkGrammar(RequestModel):
    """A context-free grammar in Lark's syntax; not in TGI."""

    type: Literal["lark", "ebnf"]
    value: str

    def raw(self) -> RawGrammar:
        """Translate."""
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
    """None stands for any object."""

    def raw(self) -> RawGrammar:
        """Translate."""
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
    """Return the grammar of a schema in OpenAI's form, where None stands for any object."""
    return ANY_OBJECT if schema is None else RawGrammar(GrammarKind.JSON_SCHEMA, schema)


META = frozenset("\\.+*?()|[]{}^$#&-~")
"""Characters with a meaning in regular expressions."""
Choice = Annotated[list[str], Field(min_length=1, max_length=10_000, fail_fast=True)]


class StructuredOutputs(RequestModel):
    """vLLM's: one of these."""

    place = Place.STRUCTURED_OUTPUTS

    json_: Any = Field(alias="json", default=None)
    """A schema, as an object or as text."""
    regex: str | None = None
    choice: Choice | None = None
    grammar: str | None = None
    """In Lark's syntax."""
    json_object: bool | None = None

    def given(self) -> dict[str, RawGrammar]:
        """Return the grammars by the names of their fields."""
        return _by_field(
            "structured_outputs.",
            json=_schema(self.json_),
            regex=_of(GrammarKind.REGEX, self.regex),
            choice=one_of(self.choice),
            grammar=_of(GrammarKind.LARK, self.grammar),
            json_object=ANY_OBJECT if self.json_object else None,
        )


class GuidedFields(RequestModel):
    """Fields of chats and text completions."""

    structured_outputs: StructuredOutputs | None = None
    """A grammar for the answer, in vLLM's form. Range: one of `json`, `regex`, `choice`, `grammar` and `json_object`.
    Default: none.
    """
    guided_json: Any = None
    """JSON schema that the answer has to match. Range: at most one field with a grammar. Default: none."""
    guided_regex: str | None = None
    """Regular expression that the whole answer has to match. Range: at most one field with a grammar. Default: none."""
    guided_choice: Choice | None = None
    """Texts of which the answer is one. Range: 1 to 10000 texts; at most one field with a grammar. Default: none."""
    guided_grammar: str | None = None
    """Grammar in Lark's syntax that the answer has to match. Range: at most one field with a grammar. Default: none."""
    json_schema: Any = None
    """JSON schema that the answer has to match. Range: at most one field with a grammar. Default: none."""
    regex: str | None = None
    """Regular expression that the whole answer has to match. Range: at most one field with a grammar. Default: none."""
    ebnf: str | None = None
    """Grammar in Lark's syntax that the answer has to match. Range: at most one field with a grammar. Default: none."""

    def guide(self, response_format: RawGrammar | None) -> RawGrammar | None:
        """Return the grammar beside, or instead of, that of `response_format`; raises ValidationError for several."""
        given = {} if self.structured_outputs is None else self.structured_outputs.given()
        given |= _by_field(
            "",
            guided_json=_schema(self.guided_json),
            guided_regex=_of(GrammarKind.REGEX, self.guided_regex),
            guided_choice=one_of(self.guided_choice),
            guided_grammar=_of(GrammarKind.LARK, self.guided_grammar),
            json_schema=_schema(self.json_schema),
            regex=_of(GrammarKind.REGEX, self.regex),
            ebnf=_of(GrammarKind.LARK, self.ebnf),
            response_format=response_format,
        )
        if len(given) > 1:
            names = ", ".join(f"`{name}`" for name in given)
            raise ValidationError(f"{names} exclude each other: the text can match only one")
        return next(iter(given.values()), None)


def one_of(choice: list[str] | None) -> RawGrammar | None:
    """Return the grammar of a text that is one of `choice`."""
    if choice is None:
        return None
    return RawGrammar(GrammarKind.REGEX, "|".join(f"(?:{_literal(text)})" for text in choice))


def _literal(text: str) -> str:
    return "".join(f"\\{char}" if char in META else char for char in text)


def _schema(value: object) -> RawGrammar | None:
    return None if value is None else RawGrammar(GrammarKind.JSON_SCHEMA, value)


def _of(kind: GrammarKind, source: str | None) -> RawGrammar | None:
    return None if source is None else RawGrammar(kind, source)


def _by_field(prefix: str, **grammars: RawGrammar | None) -> dict[str, RawGrammar]:
    return {prefix + name: one for name, one in grammars.items() if one is not None}
