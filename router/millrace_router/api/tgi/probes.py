"""Routes for operators: health, description, metrics, quarantined requests."""

from __future__ import annotations

from aiohttp import web

from millrace_router.api.tgi.info import QuarantineJson, VersionJson, info_json
from millrace_router.errors import ShuttingDown
from millrace_router.server.bodies import json_response
from millrace_router.server.services import SERVICES
from millrace_router.telemetry.exposition import CONTENT_TYPE, render
from millrace_router.version import VERSION


def register(app: web.Application) -> None:
    """Add the routes to `app`."""
    for path in ("/health", "/ping"):
        app.router.add_get(path, health)
    app.router.add_get("/livez", livez)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/v1/quarantine", quarantine)
    app.router.add_get("/info", info)
    app.router.add_get("/version", version)
    app.router.add_get("/metrics", metrics)


async def health(request: web.Request) -> web.Response:
    """`GET /health`: an empty 200 while the server works or recovers in time, or 503."""
    services = request.app[SERVICES]
    if services.infer.draining:
        raise ShuttingDown
    await services.health.check()
    return web.Response()


async def livez(_: web.Request) -> web.Response:
    """`GET /livez`: an empty 200 while this process answers, whatever the shards do."""
    return web.Response()


async def readyz(request: web.Request) -> web.Response:
    """`GET /readyz`: an empty 200 if a request would run at once, or 503."""
    services = request.app[SERVICES]
    if services.infer.draining:
        raise ShuttingDown
    await services.health.check_ready()
    return web.Response()


async def quarantine(request: web.Request) -> web.Response:
    """`GET /v1/quarantine`: the requests that broke the shards, newest first, without their text."""
    answer: QuarantineJson = {"quarantined": request.app[SERVICES].quarantine.to_json()}
    return json_response(answer)


async def info(request: web.Request) -> web.Response:
    """`GET /info`: the model and every limit, with the fields that TGI 3 dropped; with costs if asked."""
    costs = request.query.get("costs") == "true"
    return json_response(info_json(request.app[SERVICES], costs=costs))


async def version(_: web.Request) -> web.Response:
    """`GET /version`: the version of the server, as vLLM has it."""
    answer: VersionJson = {"version": VERSION}
    return json_response(answer)


async def metrics(request: web.Request) -> web.Response:
    """`GET /metrics` in Prometheus' text format.

    Proxies keep this path to themselves, and not all of them read `/%6detrics` as the same: it is none.
    """
    if "%" in request.raw_path.partition("?")[0]:
        raise web.HTTPNotFound
    body = render(request.app[SERVICES].metrics.registry)
    return web.Response(body=body, headers={"content-type": CONTENT_TYPE})
