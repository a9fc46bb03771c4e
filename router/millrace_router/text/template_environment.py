"""The environment of chat templates: jinja2's sandbox with the names that transformers defines."""

from __future__ import annotations

import json
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_INDENTED_CHARS = 8_000_000
"""Limit for indented JSON, since indentation makes a deeply nested list a hundred times as long."""


def template_environment() -> ImmutableSandboxedEnvironment:
    """Make an environment as transformers does: whitespace rules, `tojson`, `raise_exception`, `strftime_now`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTags, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTags(Extension):
    """Renders `{% generation %}` blocks, which mark assistant text for training, as plain text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  (templates pass it by position)
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
        return encoder.encode(value)
    pieces, num_chars = [], 0
    for piece in encoder.iterencode(value):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > _MAX_INDENTED_CHARS:
            raise JinjaError(f"more than {_MAX_INDENTED_CHARS} characters of indented JSON")
    return "".join(pieces)


def _raise_exception(message: str) -> NoReturn:
    raise JinjaError(message)


def _strftime_now(pattern: str) -> str:
    # Templates show local time as the user's date, as in transformers.
    return datetime.now().astimezone().strftime(pattern)
