"""Requests with and without a grammar, all of the same lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.parts.client import DETAILS, Request
from bench.parts.fixture import Fixture

PROMPT_TOKENS = 64
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PEOPLE = {
    "type": "object",
    "properties": {"people": {"type": "array", "items": PERSON, "minItems": 400}},
    "required": ["people"],
    "additionalProperties": False,
}
"""A schema for more people than fit into any answer, so that no answer ends early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarRequest(Request):
    """A request for an answer in JSON."""

    schema: dict[str, Any]

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        # The grammar decides where a text ends.
        details = {name: value for name, value in DETAILS.items() if name != "ignore_eos"}
        parameters = {**details, "max_new_tokens": self.output_tokens}
        grammar = {"type": "json", "value": self.schema}
        return {"inputs": self.prompt, "parameters": {**parameters, "grammar": grammar}}


def request(fixture: Fixture, seed: str, *, output_tokens: int, has_grammar: bool) -> Request:
    """A request for `output_tokens` tokens, with or without a schema."""
    prompt = fixture.texts.prompt(PROMPT_TOKENS, seed=fixture.seed(seed))
    if not has_grammar:
        return Request(prompt=prompt, prompt_tokens=PROMPT_TOKENS, output_tokens=output_tokens)
    return GrammarRequest(
        prompt=prompt, prompt_tokens=PROMPT_TOKENS, output_tokens=output_tokens, schema=PEOPLE
    )


def requests(
    fixture: Fixture, seed: str, *, num_plain: int, num_with_grammar: int
) -> Sequence[Request]:
    """Requests of both kinds, those with a grammar last."""
    output_tokens = fixture.fitting(fixture.sized(256, 48))
    return [
        request(
            fixture,
            f"{seed}/{number}",
            output_tokens=output_tokens,
            has_grammar=number >= num_plain,
        )
        for number in range(num_plain + num_with_grammar)
    ]
