"""Answers of the routes for embeddings and scores."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict


class PoolingUsageJson(TypedDict):
    """Token counts, in OpenAI's form."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingJson(TypedDict):
    """One embedding."""

    object: str
    index: int
    embedding: list[float] | str
    """Numbers, or their float32 in base64."""


class EmbeddingsJson(TypedDict):
    """Answer of `/v1/embeddings`."""

    object: str
    data: list[EmbeddingJson]
    model: str
    usage: PoolingUsageJson


class LoraxEmbedJson(TypedDict):
    """Answer of `/embed` to LoRAX's clients."""

    embeddings: list[float]


class RankJson(TypedDict):
    """One document of TEI's `/rerank`, the best first."""

    index: int
    score: float
    text: NotRequired[str]


class RankedDocumentJson(TypedDict):
    """A document."""

    text: str


class RerankResultJson(TypedDict):
    """One document of a ranking, the best first."""

    index: int
    relevance_score: float
    document: NotRequired[RankedDocumentJson]


class RerankJson(TypedDict):
    """Answer of `/v1/rerank`."""

    id: str
    model: str
    results: list[RerankResultJson]
    usage: PoolingUsageJson


class ScoreItemJson(TypedDict):
    """The score of one pair."""

    index: int
    object: str
    score: float


class ScoreJson(TypedDict):
    """Answer of `/v1/score`."""

    id: str
    object: str
    created: int
    model: str
    data: list[ScoreItemJson]
    usage: PoolingUsageJson
