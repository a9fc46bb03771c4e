"""Reads bodies, and looks for fields that the server does not use: nothing is ignored in silence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TypeVar

from aiohttp import web
from pydantic import AliasChoices

from millrace_router.api.body.fields import RequestModel
from millrace_router.api.body.refused_fields import (
    NESTED,
    UNUSED_FIELDS,
    RefusedField,
    UnusedFields,
)
from millrace_router.errors import ValidationError
from millrace_router.server.bodies import read_json, to_model
from millrace_router.server.headers import note_ignored
from millrace_router.server.services import SERVICES, Services, count_refusal

Model = TypeVar("Model", bound=RequestModel)


async def read_request(request: web.Request, model: type[Model]) -> Model:
    """Parse the body as `model`; raises BodyError, BodyShapeError, or as `request_of`."""
    return request_of(request, await read_json(request), model)


def request_of(request: web.Request, parsed: object, model: type[Model]) -> Model:
    """Check JSON against `model`, and name what it does not use in the answer.

    Raises:
        BodyShapeError: the JSON has another shape.
        ValidationError: a field would change the answer and is not supported, or is unknown with `--strict-fields`.

    """
    body, ignored = checked(request.app[SERVICES], parsed, model)
    if ignored:
        note_ignored(request, ignored)
    return body


def checked(services: Services, parsed: object, model: type[Model]) -> tuple[Model, list[str]]:
    """Return the body, and the names of what has no effect; raises as `request_of`."""
    body = to_model(parsed, model)
    ignored: list[str] = []
    for path, field in unused_fields(parsed, body):
        refusal = _refusal(services, path, field)
        if refusal is not None:
            count_refusal(services.metrics, refusal)
            raise refusal
        ignored.append(path)
    return body, ignored


def _refusal(services: Services, path: str, field: RefusedField | None) -> ValidationError | None:
    """Return why a field that is not used is refused; None if it is only ignored."""
    if field is None and services.config.strict_fields:
        return ValidationError(f"`{path[:100]}` is not a field of this route")
    if field is not None and not services.dialect.ignores_foreign_fields:
        reason = f": {field.reason}" if field.reason else ""
        return ValidationError(f"`{path}` is not supported{reason}")
    return None


def unused_fields(
    parsed: object, body: RequestModel, prefix: str = ""
) -> Iterator[tuple[str, RefusedField | None]]:
    """Yield the paths of fields that the server does not use, each with the reason if it is refused, else None.

    Null means absent. Items of a list share one path, such as `messages.name`.
    """
    if body.is_open or not isinstance(parsed, Mapping):
        return
    unused = UnusedFields() if body.scope is None else UNUSED_FIELDS[body.scope]
    is_nested = bool(prefix) and body.scope is None
    names = names_of(type(body))
    for name, value in parsed.items():
        if name in names:
            yield from _within(value, getattr(body, names[name]), f"{prefix}{name}.")
        elif (field := unused.refused.get(name)) is not None:
            if field.refuses(value):
                yield prefix + name, field
        elif not (value is None or name in unused.without_effect or (is_nested and name in NESTED)):
            yield prefix + name, None


def _within(parsed: object, read: object, prefix: str) -> Iterator[tuple[str, RefusedField | None]]:
    """Yield the unused fields of what was read of `parsed`: an object, or a list of objects."""
    if isinstance(read, RequestModel):
        yield from unused_fields(parsed, read, prefix)
    elif (
        isinstance(read, Sequence)
        and not isinstance(read, str)
        and isinstance(parsed, list)
        and len(parsed) == len(read)
    ):
        for source, item in zip(parsed, read, strict=True):
            if isinstance(item, RequestModel):
                yield from unused_fields(source, item, prefix)


@cache
def names_of(model: type[RequestModel]) -> dict[str, str]:
    """Return the attributes of a model by the names that its fields have in JSON."""
    names: dict[str, str] = {}
    for attribute, info in model.model_fields.items():
        alias = info.validation_alias
        if isinstance(alias, AliasChoices):
            names |= {choice: attribute for choice in alias.choices if isinstance(choice, str)}
        else:
            names[alias if isinstance(alias, str) else info.alias or attribute] = attribute
    return names
