"""JSON in and out of HTTP bodies.

The last value counts if an object has a key twice, as in most parsers.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from itertools import accumulate
from typing import TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel
from pydantic import ValidationError as ShapeError

from millrace_router.errors import (
    BodyError,
    BodySizeError,
    BodyTimeout,
    EncodingError,
    MediaTypeError,
    RouterError,
    Unhealthy,
)
from millrace_router.validation.shape_messages import shape_error

MAX_DEPTH = 200
"""Most levels of arrays and objects in a body. orjson, which may render them again, has a limit of 254."""
MAX_CONTAINERS = 20_000
"""Most arrays and objects in a body: they take 20 times as long to read as numbers and texts, and block the loop."""
BODY_SECONDS = 120.0
"""Time limit for a body to arrive. aiohttp waits forever for the rest of a body with malformed chunks."""
ENCODINGS = frozenset({"", "identity", "gzip", "deflate"})

_NO_BRACKETS = bytes(set(range(256)) - set(b'[]{}"'))
"""All bytes except brackets and quotes."""
_LEVELS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}

ERROR_TYPE: web.ResponseKey[str] = web.ResponseKey("error_type", str)
"""Type of the request's failure, for the log."""

Model = TypeVar("Model", bound=BaseModel)


async def read_body(request: web.Request) -> bytes:
    """Read the body, which the request keeps: reading it again costs nothing.

    Raises:
        BodySizeError: the body is longer than the application's limit.
        BodyTimeout: it does not arrive in time.

    """
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise BodySizeError from None
    except TimeoutError:
        raise BodyTimeout(BODY_SECONDS) from None


async def read_json(request: web.Request) -> object:
    """Parse the body; raises as `read_body`, and what follows.

    Raises:
        MediaTypeError: the content type is not JSON.
        EncodingError: the body is compressed in an unknown way.
        BodySizeError: it is longer than the limit once it is decompressed.
        BodyError: it cannot be decompressed, is not JSON, nested too deeply, or in too many parts.

    """
    if not _is_json(request.content_type):
        raise MediaTypeError
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ENCODINGS:
        raise EncodingError(encoding.encode(errors="backslashreplace").decode())
    body = _decompressed(await read_body(request), encoding, limit=request.client_max_size)
    check_structure(body)
    try:
        parsed: object = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BodyError(f"Failed to parse the request body as JSON: {error}") from None
    return parsed


def check_structure(body: bytes) -> None:
    """Raise BodyError for JSON with too many levels or containers; other mistakes are not looked for."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    brackets = _brackets_of(body)
    opening = brackets.count(b"[") + brackets.count(b"{")
    if opening > MAX_CONTAINERS:
        raise BodyError(
            f"Failed to parse the request body as JSON: more than {MAX_CONTAINERS} arrays and objects"
        )
    if max(accumulate(map(_LEVELS.__getitem__, brackets)), default=0) > MAX_DEPTH:
        raise BodyError(
            f"Failed to parse the request body as JSON: more than {MAX_DEPTH} levels deep"
        )


def _brackets_of(body: bytes) -> bytes:
    """Return the brackets outside strings, by methods in C: there may be megabytes."""
    quotes = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_BRACKETS)
    # Few strings have brackets. Two adjacent quotes are an empty string, or end one string and begin another.
    return b"".join(quotes.replace(b'""', b"").split(b'"')[::2])


def _decompressed(body: bytes, encoding: str, *, limit: int) -> bytes:
    """Undo a known encoding; raises BodySizeError for more than `limit` bytes, or BodyError."""
    if encoding in {"", "identity"}:
        return body
    # Many clients send deflate without the zlib header that the standard requires.
    bare = encoding == "deflate" and body[:1] and body[0] & 0xF != zlib.DEFLATED
    inflate = zlib.decompressobj(-zlib.MAX_WBITS if bare else zlib.MAX_WBITS | 32)
    try:
        plain = inflate.decompress(body, limit + 1)
    except zlib.error as error:
        raise BodyError(f"Failed to decompress the request body: {error}") from None
    if len(plain) > limit:
        raise BodySizeError
    if not inflate.eof or inflate.unused_data:
        raise BodyError("Failed to decompress the request body: it is cut short or too long")
    return plain


async def read_model(request: web.Request, model: type[Model]) -> Model:
    """Parse the body as `model`; raises BodyError as `read_json`, or BodyShapeError."""
    return to_model(await read_json(request), model)


def to_model(parsed: object, model: type[Model]) -> Model:
    """Check JSON against `model`; raises BodyShapeError."""
    try:
        return model.model_validate(parsed)
    except ShapeError as error:
        raise shape_error(error, parsed) from None


def json_response(
    body: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Render `body`, whose types orjson must know."""
    return web.Response(
        body=orjson.dumps(body), status=status, headers=headers, content_type="application/json"
    )


def error_body(error: RouterError) -> bytes:
    """Render TGI's error envelope; `Unhealthy` has its reason in it."""
    body = {"error": str(error), "error_type": error.error_type}
    if isinstance(error, Unhealthy) and error.reason is not None:
        body["reason"] = error.reason
    return orjson.dumps(body)


def error_response(error: RouterError) -> web.Response:
    """Render an error with its status."""
    response = web.Response(
        body=error_body(error), status=error.status, content_type="application/json"
    )
    response[ERROR_TYPE] = error.error_type
    if error.retry_after_seconds is not None:
        response.headers["retry-after"] = str(error.retry_after_seconds)
    return response


def plain_response(error: RouterError) -> web.Response:
    """Render an error as TGI does for a body that cannot be read: only its message, as text."""
    response = web.Response(text=str(error), status=error.status)
    response[ERROR_TYPE] = error.error_type
    return response


def _is_json(content_type: str) -> bool:
    main_type, _, subtype = content_type.partition("/")
    return main_type == "application" and (subtype == "json" or subtype.endswith("+json"))
