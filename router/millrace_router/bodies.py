"""JSON in and out of HTTP bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel
from pydantic import ValidationError as ShapeError

from millrace_router.errors import (
    BodyError,
    BodyShapeError,
    BodySizeError,
    MediaTypeError,
    Overloaded,
    RouterError,
)

Model = TypeVar("Model", bound=BaseModel)


async def read_json(request: web.Request) -> object:
    """Parse the body.

    Raises:
        MediaTypeError: the body does not claim to be JSON.
        BodySizeError: it is longer than the application's limit.
        BodyError: it is not JSON.

    """
    if not _is_json(request.content_type):
        raise MediaTypeError
    try:
        body = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise BodySizeError from None
    try:
        parsed: object = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BodyError(f"Failed to parse the request body as JSON: {error}") from None
    return parsed


async def read_model(request: web.Request, model: type[Model]) -> Model:
    """Parse the body as `model`; raises BodyError as `read_json`, or BodyShapeError."""
    parsed = await read_json(request)
    try:
        return model.model_validate(parsed)
    except ShapeError as error:
        raise BodyShapeError(shape_message(error)) from None


def shape_message(error: ShapeError) -> str:
    """Say where the body differs from what was expected, and how; the first difference only."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ""
    for step in first["loc"]:
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    where = f"{path.removeprefix('.')}: " if path else ""
    return f"Failed to deserialize the JSON body into the target type: {where}{first['msg']}"


def json_response(
    body: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Render `body`, which must be made of what orjson knows."""
    return web.Response(
        body=orjson.dumps(body), status=status, headers=headers, content_type="application/json"
    )


def error_body(error: RouterError) -> bytes:
    """Render TGI's error envelope."""
    return orjson.dumps({"error": str(error), "error_type": error.error_type})


def error_response(error: RouterError) -> web.Response:
    """Render an error with its status."""
    response = web.Response(
        body=error_body(error), status=error.status, content_type="application/json"
    )
    if isinstance(error, Overloaded):
        response.headers["retry-after"] = str(error.retry_after_seconds)
    return response


def _is_json(content_type: str) -> bool:
    kind, _, subtype = content_type.partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))
