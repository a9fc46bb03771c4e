"""Reads bodies, and looks for fields that the server does not use: nothing is ignored in silence."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain, islice
from typing import TypeVar

from aiohttp import web

from millrace_router.api.body.fields import RequestModel, names_of
from millrace_router.api.body.refused_fields import (
    NESTED,
    UNUSED_FIELDS,
    RefusedField,
    UnusedFields,
)
from millrace_router.errors import BodyError, Overloaded, ValidationError
from millrace_router.server.bodies import off_loop, read_json, receive_json, to_model
from millrace_router.server.headers import note_ignored
from millrace_router.server.services import SERVICES, Services, count_refusal

MOST_NAMED = 100
"""Most unused fields of a body that are named; of further ones only those that are refused matter."""

Model = TypeVar("Model", bound=RequestModel)


async def read_request(
    request: web.Request, model: type[Model], *, generates: bool = True
) -> Model:
    """Parse the body as `model`; raises as `admitted` and `request_of`."""
    async with admitted(request, generates=generates):
        return await request_of(request, await read_json(request), model)


@asynccontextmanager
async def admitted(request: web.Request, *, generates: bool = True) -> AsyncIterator[None]:
    """Receive the body, and hold a permit while it is parsed in the block: a full server parses nothing.

    Too few permits count in the metrics as a request that failed if the route `generates`.

    Raises:
        BodyError, Overloaded, ShuttingDown.

    """
    await receive_json(request)
    services = request.app[SERVICES]
    try:
        async with services.infer.permit():
            yield
    except Overloaded as error:
        if generates:
            count_refusal(services.metrics, error)
        raise


async def request_of(request: web.Request, parsed: object, model: type[Model]) -> Model:
    """Check JSON against `model`, and name what it does not use in the answer.

    Raises:
        BodyShapeError: the JSON has another shape.
        ValidationError: a field would change the answer and is not supported, or is unknown with `--strict-fields`.

    """
    services = request.app[SERVICES]
    try:
        body, ignored = await off_loop(request, partial(checked, services, parsed, model))
    except BodyError:
        raise
    except ValidationError as error:
        count_refusal(services.metrics, error)
        raise
    if ignored:
        note_ignored(request, ignored)
    return body


IMAGES = frozenset(("image", "image_url", "input_image"))
"""Types of parts and blocks that are pictures."""


def checked(services: Services, parsed: object, model: type[Model]) -> tuple[Model, list[str]]:
    """Return the body, and the first names of what has no effect; raises as `request_of`."""
    body = to_model(parsed, model, takes_fractions=not services.dialect.has_tgi_errors)
    ignored: dict[str, None] = {}
    for path, field in unused_fields(parsed, body):
        refusal = _refusal(services, path, field)
        if refusal is not None:
            raise refusal
        if len(ignored) < MOST_NAMED:
            ignored[path] = None
    left_out = body.left_out()
    if services.dialect.reads_images:
        left_out = (name for name in left_out if name.rpartition(".")[2] not in IMAGES)
    return body, list(islice(dict.fromkeys(chain(ignored, left_out)), MOST_NAMED))


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
