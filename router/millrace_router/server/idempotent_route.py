"""A wrapper of handlers that makes them serve requests with an `Idempotency-Key`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial, wraps
from http import HTTPStatus

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from millrace_router.errors import BodyError, NotResumable, RouterError
from millrace_router.request.continuation import Answer
from millrace_router.server.bodies import drop_body, read_body
from millrace_router.server.connections import IS_ANSWERED
from millrace_router.server.continuing import (
    CONTINUED,
    Continued,
    expand,
    may_be_continued,
    start_of,
    submit,
)
from millrace_router.server.headers import ANSWER, NAMES, noted_headers
from millrace_router.server.idempotency import (
    AWAITED_SECONDS,
    Run,
    Runs,
    WholeAnswer,
    digest_of,
    last_event_of,
    other_body,
    owned_key,
    scope_of,
    unknown_event,
)
from millrace_router.server.operation import Operation
from millrace_router.server.recording import Recording, ResumedStream
from millrace_router.server.run_log import LoggedRun, RunLog, RunRecorder
from millrace_router.server.services import SERVICES, count_refusal, counting_refusals
from millrace_router.server.sse import RUN, cut_off, send

log = structlog.get_logger(__name__)

RUNS: web.AppKey[Runs] = web.AppKey("runs", Runs)


@dataclass(slots=True)
class Kept:
    """What outlives the router of its keyed requests."""

    run_log: RunLog | None = None
    expected: dict[bytes, Continued] = field(default_factory=dict)
    """Runs of the former router that wait for their clients, by scope."""


KEPT: web.AppKey[Kept] = web.AppKey("kept_runs", Kept)
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
    owned, expected = (
        owned_key(request.headers, request.match_info["key"]),
        request.app[KEPT].expected,
    )
    waiting = [scope for scope in expected if scope.startswith(owned)]
    for scope in waiting:
        _expire(expected, scope, expected[scope])
    if not (request.app[RUNS].end(owned) or waiting):
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
        if CONTINUED in request:
            _go_on(request, handler, *request[CONTINUED])
            return web.Response()
        with counting_refusals(request.app[SERVICES].metrics):
            scope = scope_of(request.headers, request.path)
        if scope is None:
            return await handler(request)
        body = await read_body(request)
        with counting_refusals(request.app[SERVICES].metrics):
            num_known = last_event_of(request.headers)
            run = request.app[RUNS].find(scope, _digest_of(request, body))
            if run is not None:
                drop_body(request)
            elif (run := _resume(request, handler, scope, body)) is None:
                if num_known:
                    raise NotResumable
                run = _begin(request, handler, scope, body)
        with request.app[RUNS].reading(scope, run):
            return await _read(request, run, num_known)

    return answer


def _begin(request: web.Request, handler: Handler, scope: bytes, body: bytes) -> Run:
    """Start a run, and log it for the next router; raises ValidationError."""
    start = start_of(request, scope, _digest_of(request, body), body)
    run = request.app[RUNS].start(scope, start.body_digest, partial(_work, handler, request))
    run_log = request.app[KEPT].run_log
    recorder = None if run_log is None else run_log.begin(start)
    if recorder is not None:
        run.recorder, run.recorded = recorder, Answer(recorder)
    return run


def _resume(request: web.Request, handler: Handler, scope: bytes, body: bytes) -> Run | None:
    """Continue a run of the former router that has waited for this request, if there is one."""
    expected = request.app[KEPT].expected
    if scope not in expected:
        return None
    recorder, logged = expected[scope]
    if logged.start.body_digest != _digest_of(request, body):
        raise other_body()
    del expected[scope]
    request[NAMES] = logged.start.names
    expand(request, logged)
    return _go_on(request, handler, recorder, logged)


def _go_on(request: web.Request, handler: Handler, recorder: RunRecorder, logged: LoggedRun) -> Run:
    """Start a run that another router has begun."""
    start, work = logged.start, partial(_work, handler, request)
    run = request.app[RUNS].start(start.scope, start.body_digest, work, is_continued=True)
    run.recorder, run.recorded = recorder, Answer(recorder, logged.tokens, logged.beginnings)
    run.park = partial(_park, request.app, recorder)
    recorder.tried()
    return run


def _digest_of(request: web.Request, body: bytes) -> bytes:
    return digest_of(request.headers.get("content-encoding", ""), body)


async def continue_runs(app: web.Application, run_log: RunLog) -> int:
    """Continue the keyed requests of the former router; return how many. From now on requests are logged for the next.

    Those with a credential, which the log does not have, wait until their clients send them again, and so do those that
    have ended.
    """
    app[KEPT].run_log = run_log
    count = 0
    for recorder, run in run_log.restored():
        if not may_be_continued(recorder, run):
            continue
        count += 1
        if run.start.needs_client or run.has_ended:
            _expect(app, (recorder, run))
        else:
            await _submit(app, recorder, run)
    return count


def _expect(app: web.Application, continued: Continued) -> None:
    """Let a run wait for its client, for a while."""
    expected, scope = app[KEPT].expected, continued[1].start.scope
    expected[scope] = continued
    seconds = max(app[SERVICES].config.resume_grace, AWAITED_SECONDS)
    asyncio.get_running_loop().call_later(seconds, partial(_expire, expected, scope, continued))


def _park(app: web.Application, recorder: RunRecorder) -> None:
    """Let a run that cannot go on now wait for its client, with the tokens that it has."""
    continued = recorder.detached()
    if continued is not None:
        _expect(app, continued)


async def _submit(app: web.Application, recorder: RunRecorder, run: LoggedRun) -> None:
    try:
        await submit(app, recorder, run)
    except Exception:
        # One request must not keep the server from starting.
        log.exception("a keyed request cannot be continued")
        recorder.forget()


def _expire(expected: dict[bytes, Continued], scope: bytes, continued: Continued) -> None:
    if expected.get(scope) is continued:
        del expected[scope]
        continued[0].forget()


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
    request[RUN], request[IS_ANSWERED] = run, False
    if run.recorded is not None:
        request[ANSWER] = run.recorded
    try:
        response = await handler(request)
    finally:
        # An idle connection holds its last request, which must not hold the answer.
        del request[RUN]
        if request.pop(IS_ANSWERED):
            request.clear()
    if not isinstance(response, web.Response):
        return None
    assert isinstance(response.body, bytes)
    headers = {**response.headers, **noted_headers(request)}
    return WholeAnswer(response.status, headers, response.body)


async def _read(request: web.Request, run: Run, num_known: int) -> web.StreamResponse:
    """Answer with the answer of the run, without the first `num_known` tokens."""
    answer = await run.answer()
    if run.is_continued and isinstance(answer, Recording):
        # The client may have read more than the former router had recorded.
        await answer.reached(num_known)
    if run.failure is not None:
        raise run.failure
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
