"""The routes for embeddings and scores, in the forms of OpenAI, TEI, LoRAX, vLLM and Cohere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import orjson
from aiohttp import web
from typing_extensions import TypeAliasType

from millrace_router.api.body.adapters import adapter_of_fields, adapter_of_model
from millrace_router.api.body.reading import read_request
from millrace_router.api.chat.route import model_name, openai_errors, openai_route
from millrace_router.api.pooling.protocol import (
    EmbeddingFields,
    EmbeddingsJson,
    EmbeddingsRequest,
    EmbedParameters,
    EmbedRequest,
    LoraxEmbedJson,
    RankJson,
    RerankJson,
    RerankRequest,
    RerankResultJson,
    ScoreJson,
    ScoreRequest,
)
from millrace_router.api.pooling.run import (
    Pair,
    Pooled,
    PoolingInput,
    embedding_run,
    score_run,
    sigmoid,
    usage_json,
)
from millrace_router.request.request import Task
from millrace_router.server.access_log import watch
from millrace_router.server.bodies import json_response
from millrace_router.server.headers import answer_headers, names_of
from millrace_router.server.idempotent_route import idempotent
from millrace_router.server.operation import GENERATING, IDEMPOTENT, Operation
from millrace_router.server.services import SERVICES, scheduling_of
from millrace_router.validation.rules import check_task

EmbedVectors = TypeAliasType("EmbedVectors", list[list[float]])
Ranks = TypeAliasType("Ranks", list[RankJson])


def _pooling(
    path: str, id_: str, summary: str, body: object, answer: object, *, openai: bool = True
) -> Operation:
    return Operation(
        method="post",
        path=path,
        id=id_,
        summary=summary,
        body=body,
        answer=answer,
        failures=GENERATING,
        openai=openai,
        headers=IDEMPOTENT,
    )


RERANK = RerankRequest, Ranks | RerankJson
SCORE = ScoreRequest, ScoreJson
OPERATIONS = (
    _pooling("/v1/embeddings", "embeddings", "Embed texts", EmbeddingsRequest, EmbeddingsJson),
    _pooling(
        "/embed",
        "embed",
        "Embed texts, as TEI does, or with `parameters` as LoRAX does",
        EmbedRequest,
        EmbedVectors | LoraxEmbedJson,
        openai=False,
    ),
    _pooling("/rerank", "rerank", "Order documents by a query", *RERANK, openai=False),
    _pooling("/v1/rerank", "rerank_v1", "The same as `/rerank`", *RERANK),
    _pooling("/v2/rerank", "rerank_v2", "The same as `/rerank`", *RERANK),
    _pooling("/score", "score", "Score pairs of texts", *SCORE, openai=False),
    _pooling("/v1/score", "score_v1", "Score pairs of texts", *SCORE),
)


def register(app: web.Application) -> None:
    """Add the routes to `app`; a server that only embeds or only scores has TEI's at `/`, too."""
    app.router.add_post("/v1/embeddings", openai_route(embeddings))
    app.router.add_post("/embed", idempotent(embed))
    app.router.add_post("/rerank", idempotent(rerank))
    app.router.add_post("/v1/rerank", openai_route(rerank))
    app.router.add_post("/v2/rerank", openai_errors(idempotent(rerank)))
    app.router.add_post("/score", idempotent(score))
    app.router.add_post("/v1/score", openai_route(score))
    tasks = app[SERVICES].limits.tasks
    if tasks == {Task.EMBED}:
        app.router.add_post("/", idempotent(embed))
    elif tasks == {Task.SCORE}:
        app.router.add_post("/", idempotent(rerank))


async def embeddings(request: web.Request) -> web.StreamResponse:
    """`POST /v1/embeddings`."""
    services = request.app[SERVICES]
    body = await read_request(request, EmbeddingsRequest)
    source = PoolingInput(body.input, "input", adapter_of_model(request, body.model))
    is_base64 = body.encoding_format == "base64"
    specials = body.add_special_tokens is not False
    pooled = await _embedded(request, body, source, is_base64=is_base64, specials=specials)
    answer = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": one}
            for index, one in enumerate(pooled.results)
        ],
        "model": model_name(services, body.model),
        "usage": usage_json(pooled.usage),
    }
    headers = answer_headers(services, pooled.generations, pooled.usage)
    return json_response(answer, headers=headers)


async def embed(request: web.Request) -> web.StreamResponse:
    """`POST /embed`: TEI's, or with `parameters` LoRAX's."""
    services = request.app[SERVICES]
    body = await read_request(request, EmbedRequest)
    parameters = body.parameters or EmbedParameters()
    adapter = adapter_of_fields(
        request,
        adapter_id=parameters.adapter_id,
        source=parameters.adapter_source,
        token=parameters.api_token,
    )
    pooled = await _embedded(request, body, PoolingInput(body.inputs, "inputs", adapter))
    headers = answer_headers(services, pooled.generations, pooled.usage)
    if body.parameters is None:
        return json_response(pooled.results, headers=headers)
    return json_response({"embeddings": pooled.results[0]}, headers=headers)


async def _embedded(
    request: web.Request,
    body: EmbeddingFields,
    source: PoolingInput,
    *,
    is_base64: bool = False,
    specials: bool = True,
) -> Pooled[orjson.Fragment]:
    """Embed all prompts of a body; raises RouterError."""
    services = request.app[SERVICES]
    check_task(Task.EMBED, services.limits)
    run = embedding_run(
        services,
        body,
        source,
        lambda form: replace(form, is_base64=is_base64).render,
        specials=specials,
        scheduling=scheduling_of(request, body.priority),
        on_start=partial(watch, request),
    )
    return await run.finish()


async def rerank(request: web.Request) -> web.StreamResponse:
    """`POST /rerank`, `/v1/rerank` and `/v2/rerank`."""
    services = request.app[SERVICES]
    body = await read_request(request, RerankRequest)
    check_task(Task.SCORE, services.limits)
    texts = body.all_texts
    names = names_of(request)
    pooled = await _scored(request, body, [(body.query, text) for text in texts])
    headers = answer_headers(services, pooled.generations, pooled.usage)
    raw = pooled.results
    order = sorted(range(len(raw)), key=lambda index: raw[index], reverse=True)
    if body.texts is not None:
        return json_response(_ranks(body, raw, order), headers=headers)
    answer: RerankJson = {
        "id": f"rerank-{names.digits('answer', 16)}",
        "model": model_name(services, body.model),
        "results": _results(body, texts, raw, order[: body.top_n]),
        "usage": usage_json(pooled.usage),
    }
    return json_response(answer, headers=headers)


def _ranks(body: RerankRequest, raw: Sequence[float], order: Sequence[int]) -> list[RankJson]:
    ranks: list[RankJson] = []
    for index in order:
        value = raw[index] if body.raw_scores else sigmoid(raw[index])
        rank: RankJson = {"index": index, "score": value}
        if body.return_text and body.texts is not None:
            rank["text"] = body.texts[index]
        ranks.append(rank)
    return ranks


def _results(
    body: RerankRequest, texts: Sequence[str], raw: Sequence[float], order: Sequence[int]
) -> list[RerankResultJson]:
    results: list[RerankResultJson] = []
    for index in order:
        result: RerankResultJson = {"index": index, "relevance_score": sigmoid(raw[index])}
        if body.return_documents is not False:
            result["document"] = {"text": texts[index]}
        results.append(result)
    return results


async def score(request: web.Request) -> web.StreamResponse:
    """`POST /score` and `/v1/score`."""
    services = request.app[SERVICES]
    body = await read_request(request, ScoreRequest)
    check_task(Task.SCORE, services.limits)
    pairs, names = body.pairs, names_of(request)
    pooled = await _scored(request, body, pairs)
    answer: ScoreJson = {
        "id": f"score-{names.digits('answer', 16)}",
        "object": "list",
        "created": names.created,
        "model": model_name(services, body.model),
        "data": [
            {"index": index, "object": "score", "score": sigmoid(raw)}
            for index, raw in enumerate(pooled.results)
        ],
        "usage": usage_json(pooled.usage),
    }
    headers = answer_headers(services, pooled.generations, pooled.usage)
    return json_response(answer, headers=headers)


async def _scored(
    request: web.Request, body: RerankRequest | ScoreRequest, pairs: Sequence[Pair]
) -> Pooled[float]:
    """Score all pairs: the log-odds of each; raises RouterError."""
    services = request.app[SERVICES]
    run = await score_run(
        services,
        body,
        pairs,
        adapter=adapter_of_model(request, body.model),
        scheduling=scheduling_of(request, body.priority),
        on_start=partial(watch, request),
    )
    return await run.finish()
