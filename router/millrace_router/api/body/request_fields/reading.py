"""Reads bodies, and looks for fields that the server does not use: nothing is ignored in silence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TypeVar

from aiohttp import web
from pydantic import AliasChoices

from millrace_router.api.body.fields import RequestModel
from millrace_router.api.body.request_fields.field import RequestField
from millrace_router.api.body.request_fields.table import NESTED, TABLE
from millrace_router.errors import ValidationError
from millrace_router.server.bodies import read_json, to_model
from millrace_router.server.headers import note_ignored
from millrace_router.server.services import SERVICES, Services, counting_refusals

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
    with counting_refusals(services.metrics):
        for path, field in unused_fields(parsed, body):
            if field is None and services.config.strict_fields:
                raise ValidationError(f"`{path[:100]}` is not a field of this route")
            if field is not None and not services.dialect.ignores_foreign_fields:
                reason = f": {field.note}" if field.note else ""
                raise ValidationError(f"`{path}` is not supported{reason}")
            ignored.append(path)
    return body, ignored


def unused_fields(
    parsed: object, body: RequestModel, prefix: str = ""
) -> Iterator[tuple[str, RequestField | None]]:
    """Yield the paths of fields that the server does not use, each with its row if it is refused, else None.

    Null means absent. Items of a list share one path, such as `messages.name`.
    """
    if body.is_open or not isinstance(parsed, Mapping):
        return
    known = {} if body.place is None else TABLE[body.place]
    names = names_of(type(body))
    for name, value in parsed.items():
        if name in names:
            yield from _within(value, getattr(body, names[name]), f"{prefix}{name}.")
        elif (field := known.get(name)) is None:
            if value is not None and not (prefix and body.place is None and name in NESTED):
                yield prefix + name, None
        elif field.refuses(value):
            yield prefix + name, field


def _within(parsed: object, read: object, prefix: str) -> Iterator[tuple[str, RequestField | None]]:
    """Yield the unused fields of what was read of `parsed`: an object, or a list of objects."""
    if isinstance(read, RequestModel):
        yield from unused_fields(parsed, read, prefix)
    elif (
        isinstance(read, Sequence)
        and not isinstance(read, str)
        and isinstance(parsed, list)
        and len(parsed) == len(read)
    ):
        for given, item in zip(parsed, read, strict=True):
            if isinstance(item, RequestModel):
                yield from unused_fields(given, item, prefix)


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
