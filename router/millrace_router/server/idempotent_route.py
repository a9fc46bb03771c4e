"""A wrapper of handlers that makes them serve requests with an `Idempotency-Key`."""

from __future__ import annotations

from functools import partial, wraps
from http import HTTPStatus

from aiohttp import web
from aiohttp.typedefs import Handler

from millrace_router.errors import BodyError, NotResumable, RouterError
from millrace_router.server.bodies import read_body
from millrace_router.server.headers import ignored_header
from millrace_router.server.idempotency import (
    Run,
    Runs,
    WholeAnswer,
    digest_of,
    last_event_of,
    owned_key,
    scope_of,
    unknown_event,
)
from millrace_router.server.operation import Operation
from millrace_router.server.recording import Recording, ResumedStream
from millrace_router.server.services import SERVICES, count_refusal, counting_refusals
from millrace_router.server.sse import RUN, cut_off, send

RUNS: web.AppKey[Runs] = web.AppKey("runs", Runs)
END_OPERATION = Operation(
    method="delete",
    path="/v1/requests/{key}",
    id="end_request",
    summary="End the request with this `Idempotency-Key`",
    failures=(HTTPStatus.GONE, HTTPStatus.UNPROCESSABLE_ENTITY),
)


async def end_runs(app: web.Application) -> None:
    """Abort all requests with keys; a hook of `on_cleanup`."""
    await app[RUNS].close()


async def end_request(request: web.Request) -> web.Response:
    """`DELETE /v1/requests/{key}`: abort and forget the caller's request with this key, or 410."""
    if not request.app[RUNS].end(owned_key(request.headers, request.match_info["key"])):
        raise NotResumable
    return web.Response()


def idempotent(handler: Handler) -> Handler:
    """Let requests with the same key, body, caller and path share one call of `handler`.

    The call outlives the connection of the first request: it runs in its own task, in which the headers and the
    body of the first request stay readable. Requests without a key go straight to `handler`. What `handler` refuses
    counts as a request that failed, unless its body cannot be read.
    """
    handler = _counted(handler)

    @wraps(handler)
    async def answer(request: web.Request) -> web.StreamResponse:
        with counting_refusals(request.app[SERVICES].metrics):
            scope = scope_of(request.headers, request.path)
        if scope is None:
            return await handler(request)
        body = await read_body(request)
        runs = request.app[RUNS]
        with counting_refusals(request.app[SERVICES].metrics):
            num_known = last_event_of(request.headers)
            body_digest = digest_of(request.headers.get("content-encoding", ""), body)
            run = runs.find(scope, body_digest)
            if run is None and num_known:
                raise NotResumable
        if run is None:
            run = runs.start(scope, body_digest, partial(_work, handler, request))
        with runs.reading(scope, run):
            return await _read(request, run, num_known)

    return answer


def _counted(handler: Handler) -> Handler:
    """Count the requests that `handler` refuses."""

    @wraps(handler)
    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except BodyError:
            raise
        except RouterError as error:
            count_refusal(request.app[SERVICES].metrics, error)
            raise

    return answer


async def _work(handler: Handler, request: web.Request, run: Run) -> WholeAnswer | None:
    request[RUN] = run
    try:
        response = await handler(request)
    finally:
        # An idle connection holds its last request, which must not hold the answer.
        del request[RUN]
    if not isinstance(response, web.Response):
        return None
    assert isinstance(response.body, bytes)
    headers = {**response.headers, **ignored_header(request)}
    return WholeAnswer(response.status, headers, response.body)


async def _read(request: web.Request, run: Run, num_known: int) -> web.StreamResponse:
    """Answer with the answer of the run, without the first `num_known` tokens."""
    answer = await run.answer()
    with counting_refusals(request.app[SERVICES].metrics):
        _check_known(answer, num_known)
    if isinstance(answer, WholeAnswer):
        return web.Response(status=answer.status, headers=answer.headers, body=answer.body)
    with ResumedStream(answer, num_known, partial(cut_off, request)) as stream:
        return await send(request, stream, answer.options)


def _check_known(answer: WholeAnswer | Recording, num_known: int) -> None:
    """Check that an answer can be resumed after `num_known` tokens; raises ValidationError or NotResumable."""
    if num_known > (answer.num_tokens if isinstance(answer, Recording) else 0):
        raise unknown_event()
    if isinstance(answer, Recording) and num_known < answer.first:
        raise NotResumable
