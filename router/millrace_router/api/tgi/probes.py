"""Routes for those who run the server: health, description, metrics, what broke the shards."""

from __future__ import annotations

from aiohttp import web

from millrace_router.api.tgi.info import InfoJson, QuarantineJson
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
    app.router.add_get("/metrics", metrics)


async def health(request: web.Request) -> web.Response:
    """`GET /health`: an empty 200 while the server works or recovers in time, or 503."""
    services = request.app[SERVICES]
    if services.infer.draining:
        raise ShuttingDown
    await services.health.check()
    return web.Response()


async def livez(_: web.Request) -> web.Response:
    """`GET /livez`: an empty 200 while this process answers at all; the shards are the launcher's business."""
    return web.Response()


async def readyz(request: web.Request) -> web.Response:
    """`GET /readyz`: an empty 200 if a request would run at once, or 503."""
    services = request.app[SERVICES]
    if services.infer.draining:
        raise ShuttingDown
    await services.health.check_ready()
    return web.Response()


async def quarantine(request: web.Request) -> web.Response:
    """`GET /v1/quarantine`: the requests that broke the shards, the newest first, without their text."""
    answer: QuarantineJson = {"quarantined": request.app[SERVICES].quarantine.to_json()}
    return json_response(answer)


async def info(request: web.Request) -> web.Response:
    """`GET /info`: the model, every limit, and what a simulator needs to know; with the fields that TGI 3 dropped."""
    services = request.app[SERVICES]
    config, shard, limits = services.config, services.shard, services.limits
    cost = services.cost
    answer: InfoJson = {
        "model_id": config.model_id,
        "model_sha": config.revision,
        "model_dtype": shard.dtype,
        "model_device_type": shard.device_type,
        "model_pipeline_tag": services.pipeline_tag,
        "max_concurrent_requests": limits.max_concurrent_requests,
        "max_best_of": limits.max_best_of,
        "max_n": limits.max_n,
        "max_stop_sequences": limits.max_stop_sequences,
        "max_top_n_tokens": limits.max_top_n_tokens,
        "max_input_tokens": limits.max_input_tokens,
        "max_input_length": limits.max_input_tokens,
        "max_total_tokens": limits.max_total_tokens,
        "waiting_served_ratio": config.waiting_served_ratio,
        "max_batch_prefill_tokens": services.max_batch_prefill_tokens,
        "max_batch_total_tokens": services.capacity.max_batch_total_tokens,
        "max_waiting_tokens": config.max_waiting_tokens,
        "max_batch_size": config.max_batch_size,
        "validation_workers": config.validation_workers,
        "max_client_batch_size": limits.max_client_batch_size,
        "prefill_chunking": config.prefill_chunking,
        "prefix_caching": config.prefix_caching,
        "kv_reservation": config.kv_reservation,
        "target_inter_token_latency": config.target_inter_token_latency,
        "fairness": config.fairness,
        "priority_ageing": config.priority_ageing,
        "max_queue_size": config.max_queue_size,
        "max_queue_wait": config.max_queue_wait,
        "steps_in_flight": config.steps_in_flight,
        "late_planning": config.late_planning,
        "late_planning_share": 0.0 if services.late is None else round(services.late.share, 4),
        "block_size": shard.block_size,
        "num_blocks": services.capacity.num_blocks,
        "cost_model": {} if cost is None else cost.to_json(),
        "step_ratios": [] if cost is None else [round(r, 4) for r in cost.variation.ratios()],
        "entry_seconds": 0.0 if cost is None else round(cost.variation.entry_seconds, 6),
        "turn_seconds": 0.0 if cost is None else round(cost.variation.turn_seconds, 6),
        "attention": shard.attention,
        "deterministic": shard.deterministic,
        "speculate": shard.speculate,
        "grammars": limits.grammars,
        "num_shard": shard.world_size,
        "router": "text-generation-router",
        "version": VERSION,
        "sha": None,
        "docker_label": None,
    }
    return json_response(answer)


async def metrics(request: web.Request) -> web.Response:
    """`GET /metrics` in Prometheus' text format."""
    body = render(request.app[SERVICES].metrics.registry)
    return web.Response(body=body, headers={"content-type": CONTENT_TYPE})
