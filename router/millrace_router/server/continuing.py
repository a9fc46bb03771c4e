"""Keyed requests over the death of a router: what of them is logged, and how the next router continues them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from hashlib import sha256
from typing import Any, cast

import structlog
from aiohttp import HttpVersion11, web
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from millrace_router.access.keys import KEY_NAME
from millrace_router.request.adapter import ADAPTER_TOKEN_HEADER
from millrace_router.request.scheduling import (
    MAX_QUEUE_HEADER,
    PRIORITY_HEADER,
    TENANT_HEADER,
    tenant_of,
)
from millrace_router.server.access_log import REQUEST_ID, REQUEST_ID_HEADER, prepare_detached
from millrace_router.server.bodies import hold_body
from millrace_router.server.headers import EXPANDED, NAMES, names_of
from millrace_router.server.run_log import MAX_TRIES, LoggedRun, RunRecorder, Start
from millrace_router.server.services import Services
from millrace_router.version import VERSION

KEPT_HEADERS = ("content-type", "content-encoding", PRIORITY_HEADER, MAX_QUEUE_HEADER)
"""Headers that handlers read, apart from credentials."""

Continued = tuple[RunRecorder, LoggedRun]
CONTINUED: web.RequestKey[Continued] = web.RequestKey("continued", tuple)
"""The run that a detached request continues."""

log = structlog.get_logger(__name__)


class _NoConnection:
    """The connection of a request that has none."""

    transport = ssl_context = peername = sockname = None


def start_of(request: web.Request, scope: bytes, body_digest: bytes, body: bytes) -> Start:
    """Return what another router needs of a request; raises ValidationError.

    Credentials are left out: a digest stands for the API key of a tenant, and the caller is part of the names. The
    body of a request with a token for adapters is left out, too, as only its client can send it again.
    """
    needs_client = ADAPTER_TOKEN_HEADER in request.headers or _may_have_token(request, body)
    headers = {name: request.headers[name] for name in KEPT_HEADERS if name in request.headers}
    headers[REQUEST_ID_HEADER] = request[REQUEST_ID]
    if tenant := tenant_of(request.headers):
        headers[TENANT_HEADER] = tenant
    return Start(
        scope=scope,
        body_digest=body_digest,
        target=request.rel_url.raw_path_qs,
        headers=headers,
        body=b"" if needs_client else body,
        names=names_of(request),
        key_name=request.get(KEY_NAME, ""),
        address=request.remote or "",
        needs_client=needs_client,
    )


def _may_have_token(request: web.Request, body: bytes) -> bool:
    """Return whether a body may have LoRAX's field of a token; nothing looks into one that is compressed."""
    return b"api_token" in body or request.headers.get("content-encoding") not in {None, "identity"}


async def submit(app: web.Application, recorder: RunRecorder, run: LoggedRun) -> None:
    """Submit a request again that the log has, to the handler of its route, without middlewares."""
    request = _detached(app, run.start)
    match = await app.router.resolve(request)
    match.add_app(app)
    match.freeze()
    request._match_info = match  # noqa: SLF001  (as `Application` does)
    prepare_detached(request, run.start.headers.get(REQUEST_ID_HEADER))
    if run.start.key_name:
        request[KEY_NAME] = run.start.key_name
    request[NAMES] = run.start.names
    request[CONTINUED] = recorder, run
    hold_body(request, run.start.body)
    expand(request, run)
    await match.handler(request)


def fingerprint(services: Services) -> bytes:
    """Return 32 bytes that differ where the tokens of one server would not be tokens of the other."""
    config, shard = services.config, replace(services.shard, int8_gain=None)
    parts = (VERSION, config.model_id, config.revision, shard, services.tokenizer.vocab_size)
    return sha256(repr(parts).encode()).digest()


def expand(request: web.Request, run: LoggedRun) -> None:
    """Give a request what the body of its run referred to."""
    if run.expanded:
        request[EXPANDED] = run.expanded


def may_be_continued(recorder: RunRecorder, run: LoggedRun) -> bool:
    """Return whether to continue a run; one with which routers have died is forgotten."""
    if run.num_tries < MAX_TRIES:
        return True
    log.warning("A keyed request is given up: routers have died while they continued it")
    recorder.forget()
    return False


def _detached(app: web.Application, start: Start) -> web.Request:
    message = RawRequestMessage(
        method="POST",
        path=start.target,
        version=HttpVersion11,
        headers=CIMultiDictProxy(CIMultiDict(start.headers)),
        raw_headers=(),
        should_close=False,
        compression=None,
        upgrade=False,
        chunked=False,
        url=URL(start.target, encoded=True),
    )
    nothing = cast("Any", _NoConnection())
    task = cast("asyncio.Task[None]", asyncio.current_task())
    return web.Request(
        message,
        EMPTY_PAYLOAD,
        nothing,
        nothing,
        task,
        asyncio.get_running_loop(),
        client_max_size=app._client_max_size,  # noqa: SLF001
        remote=start.address,
    )
