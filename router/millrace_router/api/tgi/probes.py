"""Routes for operators: health, description, metrics, quarantined requests; and the figures of `/status`."""

from __future__ import annotations

from http import HTTPStatus

from aiohttp import web
from typing_extensions import TypedDict

from millrace_router.api.tgi.info import InfoJson, QuarantineJson, VersionJson, info_json
from millrace_router.errors import RouterError, ShuttingDown, Unhealthy
from millrace_router.server.bodies import json_response
from millrace_router.server.operation import Operation
from millrace_router.server.services import SERVICES, Services
from millrace_router.telemetry.instruments import CONTENT_TYPE, render
from millrace_router.telemetry.recent import Recent
from millrace_router.version import VERSION

RECENT: web.AppKey[Recent] = web.AppKey("recent", Recent)


class StatusJson(TypedDict):
    """Answer of `/status`."""

    model_id: str
    version: str
    ready: bool
    """Whether a request sent now runs at once."""
    reason: str | None
    """Why not."""
    uptime_seconds: float
    requests_running: int
    requests_waiting: int
    max_concurrent_requests: int
    kv_use: float
    """Share of the KV blocks that running requests own, 0 to 1."""
    kv_cached: float
    """Share of the KV blocks that the prefix cache keeps until others need them, 0 to 1."""
    recoveries: int
    """Failures of the shards since the start."""
    window_seconds: float
    """Seconds that the figures below cover: a minute, or since the last request for them."""
    tokens_per_second: float
    cached_share: float | None
    """Share of the prompt tokens that the prefix cache had, 0 to 1; null without prompts."""
    first_token_median_seconds: float | None
    """Arrival to first token; null without requests."""
    first_token_p95_seconds: float | None


async def status_json(request: web.Request) -> StatusJson:
    """Describe the server as it is now."""
    services = request.app[SERVICES]
    reason = await _reason(services)
    metrics, recent = services.metrics, request.app[RECENT]
    window = recent.window()
    return {
        "model_id": services.config.model_id,
        "version": VERSION,
        "ready": reason is None,
        "reason": reason,
        "uptime_seconds": round(recent.uptime_seconds, 3),
        "requests_running": int(metrics.requests_running.value),
        "requests_waiting": int(metrics.requests_waiting.value),
        "max_concurrent_requests": services.limits.max_concurrent_requests,
        "kv_use": _share(metrics.kv_blocks_in_use.value, metrics.kv_blocks.value),
        "kv_cached": _share(metrics.kv_blocks_cached.value, metrics.kv_blocks.value),
        "recoveries": int(sum(one.value for one in metrics.recoveries.series())),
        "window_seconds": round(window.seconds, 3),
        "tokens_per_second": round(window.tokens_per_second, 3),
        "cached_share": window.cached_share,
        "first_token_median_seconds": window.first_token_seconds(0.5),
        "first_token_p95_seconds": window.first_token_seconds(0.95),
    }


async def _reason(services: Services) -> str | None:
    """Return why a request would not run at once; None if it would."""
    if services.infer.draining:
        return str(ShuttingDown())
    try:
        await services.health.check_ready()
    except Unhealthy as error:
        return error.reason or str(error)
    except RouterError as error:
        return str(error)
    return None


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


INFO_OPERATION = Operation(
    method="get",
    is_open=True,
    path="/info",
    id="get_model_info",
    summary="The model and every limit; with `?costs=true` also what steps cost, for the simulator",
    answer=InfoJson,
)
VERSION_OPERATION = Operation(
    method="get",
    is_open=True,
    path="/version",
    id="show_version",
    summary="The version of the server, as vLLM has it",
    answer=VersionJson,
)
OPERATIONS = (
    *(
        Operation(
            method="get",
            is_open=True,
            path=path,
            id=id_,
            summary="Whether the server can do its work",
            failures=(HTTPStatus.SERVICE_UNAVAILABLE,),
        )
        for path, id_ in (("/health", "health"), ("/ping", "ping"), ("/readyz", "ready"))
    ),
    Operation(
        method="get",
        is_open=True,
        path="/livez",
        id="live",
        summary="Whether the router runs, whatever its shards do",
    ),
    Operation(
        method="get",
        path="/v1/quarantine",
        id="quarantine",
        summary="The requests that broke the shards, without their text",
        answer=QuarantineJson,
    ),
    Operation(
        method="get",
        is_open=True,
        path="/metrics",
        id="metrics",
        summary="Metrics in Prometheus' text format",
        answer=bytes,
    ),
)


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
    """`GET /info`: the model and every limit, with the fields that TGI 3 dropped; with costs if they are requested."""
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
