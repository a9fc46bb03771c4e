"""vLLM's, SGLang's and llama.cpp's fields for what the text has to match."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from millrace_router.api.fields import Place, RequestModel
from millrace_router.errors import ValidationError
from millrace_router.request.grammar import ANY_OBJECT, RawGrammar
from millrace_router.request.request import GrammarKind

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
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Choice | None = None
    guided_grammar: str | None = None
    json_schema: Any = None
    """SGLang's, like the two fields below, and llama.cpp's."""
    regex: str | None = None
    ebnf: str | None = None

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
