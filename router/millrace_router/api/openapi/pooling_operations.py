"""The routes for embeddings and scores in the OpenAPI document."""

from __future__ import annotations

from typing_extensions import TypeAliasType

from millrace_router.api.openapi.operation import GENERATING, IDEMPOTENT, Operation
from millrace_router.api.pooling.protocol import (
    EmbeddingsJson,
    EmbeddingsRequest,
    EmbedRequest,
    LoraxEmbedJson,
    RankJson,
    RerankJson,
    RerankRequest,
    ScoreJson,
    ScoreRequest,
)

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
POOLING_OPERATIONS = (
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
