"""JSON in and out of HTTP bodies.

The last value counts if an object has a key twice, as in most parsers.
"""

from __future__ import annotations

import asyncio
import codecs
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from threading import Lock
from typing import TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel
from pydantic import ValidationError as ShapeError

from millrace_router.errors import (
    BodyError,
    BodyShapeError,
    BodySizeError,
    BodyTimeout,
    EncodingError,
    MediaTypeError,
    Overloaded,
    RouterError,
    Unhealthy,
)
from millrace_router.server.connections import CONNECTIONS, Connection, Held
from millrace_router.validation.shape_messages import make_whole, shape_error

MAX_DEPTH = 200
"""Most levels of arrays and objects in a body. orjson, which may render them again, has a limit of 254."""
MAX_CONTAINERS = 20_000
"""Most arrays and objects in a body: they take 20 times as long to read as numbers and texts, and block the loop."""
BODY_SECONDS = 120.0
"""Time limit for a body to arrive. aiohttp waits forever for the rest of a body with malformed chunks."""
PLAIN_ENCODINGS = frozenset({"", "identity"})
ENCODINGS = PLAIN_ENCODINGS | {"gzip", "deflate"}
LARGE_BYTES = 1 << 16
"""Size above which a body is parsed in a thread: parsing, checking and naming its parts takes milliseconds."""

_NO_BRACKETS = bytes(set(range(256)) - set(b'[]{}"'))
"""All bytes except brackets and quotes."""
_LEVELS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}

ERROR_TYPE: web.ResponseKey[str] = web.ResponseKey("error_type", str)
"""Type of the request's failure, for the log."""
_BODY: web.RequestKey[Held] = web.RequestKey("body", Held)
_IS_LARGE: web.RequestKey[bool] = web.RequestKey("is_large", bool)
_STREAMS: web.RequestKey[bool] = web.RequestKey("streams", bool)
_WORKER: web.AppKey[ThreadPoolExecutor] = web.AppKey("parser", ThreadPoolExecutor)
_TURN: web.AppKey[asyncio.Lock] = web.AppKey("turn", asyncio.Lock)
"""Held during a call of the worker. The loop passes it on, so it handles its ready sockets between two calls, each of
which may keep the interpreter for tens of milliseconds."""

MAX_WHOLE_NUMBERS = 20
"""Most fields and lists of one body that have whole numbers with a fraction; each takes one more check."""

_COMPLETING = Lock()
Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")


def prepare_parser(app: web.Application) -> None:
    """Give `app` the thread that parses large bodies, one after the other."""
    worker = app[_WORKER] = ThreadPoolExecutor(1, thread_name_prefix="parse")
    app[_TURN] = asyncio.Lock()

    async def close(_: web.Application) -> None:
        worker.shutdown(wait=False, cancel_futures=True)

    app.on_cleanup.append(close)


async def read_body(request: web.Request) -> bytes:
    """Receive the body, which the request keeps until it is parsed: reading it again costs nothing.

    Raises:
        BodySizeError: the body is longer than the application's limit.
        BodyTimeout: it does not arrive in time.
        Overloaded: the bodies of all requests are larger than the memory for them, and this one is the oldest.

    """
    held = request.get(_BODY)
    if held is None:
        held = request[_BODY] = await _receive(request)
    return held.data


def hold_body(request: web.Request, body: bytes) -> None:
    """Give a request that has no connection its body."""
    request[_BODY] = Held(body, request.app[CONNECTIONS])


async def _receive(request: web.Request) -> Held:
    connection = request.protocol
    assert isinstance(connection, Connection)
    body = bytearray()
    try:
        async with connection.receiving(BODY_SECONDS):
            while chunk := await request.content.readany():
                if len(body) + len(chunk) > request.client_max_size:
                    raise BodySizeError
                body += chunk
                connection.receive(len(chunk))
    except TimeoutError:
        if connection.was_cut:
            message = "Model is overloaded: too many request bodies are being received"
            raise Overloaded(message, retry_after_seconds=1.0) from None
        raise BodyTimeout(BODY_SECONDS) from None
    return Held(bytes(body), request.app[CONNECTIONS])


async def off_loop(request: web.Request, call: Callable[[], Result]) -> Result:
    """Make a call whose time grows with the body: in the thread for large bodies, or at once for a small one."""
    if not request.get(_IS_LARGE):
        return call()
    async with request.app[_TURN]:
        return await asyncio.get_running_loop().run_in_executor(request.app[_WORKER], call)


async def receive_json(request: web.Request) -> None:
    """Receive the body of a request whose headers say that it is JSON; raises as `read_json`."""
    if not _is_json(request.content_type):
        raise MediaTypeError
    encoding = _encoding_of(request)
    if encoding not in ENCODINGS:
        raise EncodingError(encoding.encode(errors="backslashreplace").decode())
    body = await read_body(request)
    request[_IS_LARGE] = len(body) > LARGE_BYTES or encoding not in PLAIN_ENCODINGS


async def read_json(request: web.Request, *, again: bool = False) -> object:
    """Parse the body, which is dropped then, unless it is read `again`.

    Raises:
        MediaTypeError: the content type is not JSON.
        EncodingError: the body is compressed in an unknown way.
        BodySizeError: it is longer than the limit, or longer once it is decompressed.
        BodyError: it cannot be decompressed, is not JSON, nested too deeply, or in too many parts.
        BodyTimeout, Overloaded: as for `read_body`.

    """
    await receive_json(request)
    limit, body = request.client_max_size, request[_BODY].data
    parsed = await off_loop(request, partial(_parsed, body, _encoding_of(request), limit=limit))
    request[_STREAMS] = isinstance(parsed, dict) and parsed.get("stream") is True
    if not again:
        drop_body(request)
    return parsed


async def asks_for_stream(request: web.Request) -> bool:
    """Return whether the body has `"stream": true`; raises as `read_json` unless it has been parsed already."""
    if _STREAMS not in request:
        await read_json(request)
    return request[_STREAMS]


def drop_body(request: web.Request) -> None:
    """Free the memory of the body."""
    request.pop(_BODY, None)


def _encoding_of(request: web.Request) -> str:
    return request.headers.get("content-encoding", "").strip().lower()


def _parsed(body: bytes, encoding: str, *, limit: int) -> object:
    body = _decompressed(body, encoding, limit=limit).removeprefix(codecs.BOM_UTF8)
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
    if encoding in PLAIN_ENCODINGS:
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
    return await off_loop(request, partial(to_model, await read_json(request), model))


def complete(model: type[BaseModel]) -> None:
    """Make the validator of a model that leaves this to its first use; threads may do so at the same time."""
    if not model.__pydantic_complete__:
        with _COMPLETING:
            model.model_rebuild()


def to_model(parsed: object, model: type[Model], *, takes_fractions: bool = True) -> Model:
    """Check JSON against `model`; raises BodyShapeError.

    With `takes_fractions` a whole number with a fraction, such as 4.0, becomes an integer in `parsed` where the model
    needs one.
    """
    complete(model)
    for _ in range(MAX_WHOLE_NUMBERS):
        try:
            return model.model_validate(parsed)
        except ShapeError as error:
            if not (takes_fractions and make_whole(error, parsed)):
                raise shape_error(error, parsed) from None
    raise BodyShapeError("has too many whole numbers with a fraction", field="")


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
