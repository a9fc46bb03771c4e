"""Rankings and scores over a batcher whose logits are known: the first is the number of tokens, the second 2."""

from __future__ import annotations

import math
from typing import Any

import pytest

from millrace_router.request.request import Task, ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_testing.router.edge import echo, pooling_of, serving

TEXTS = ["world", "a b a", "b b"]
"""The prompt is the query and the document: 2, 4 and 3 tokens."""
RAW = [0.0, 2.0, 1.0]


def two_logits(request: ValidRequest, stream: TokenStream) -> None:
    """The first two numbers of `echo`, for the two ids of a score."""
    assert request.pooling is not None
    assert request.pooling.logit_ids == (2, 3)
    echo(request, stream)
    assert stream.pooled is not None
    stream.pooled = stream.pooled[:2]


def served(*tasks: Task, **options: Any) -> Any:
    files = options.pop("files", {})
    pooling = pooling_of(*(tasks or (Task.SCORE,)), **files)
    return serving(**{"script": two_logits, "pooling": pooling, **options})


def probability(raw: float) -> float:
    return 1 / (1 + math.exp(-raw))


async def test_a_ranking_has_the_form_of_tei() -> None:
    async with served() as edge:
        status, answer, response = await edge.post("/rerank", {"query": "hello", "texts": TEXTS})
        assert status == 200
        assert [one["index"] for one in answer] == [1, 2, 0]
        for one in answer:
            assert math.isclose(one["score"], probability(RAW[one["index"]]))
            assert one.keys() == {"index", "score"}
        assert response.headers["x-prompt-tokens"] == "9"
        body = {"query": "hello", "texts": TEXTS, "raw_scores": True, "return_text": True}
        _, answer, _ = await edge.post("/rerank", body)
        assert [(one["score"], one["text"]) for one in answer] == [
            (2.0, "a b a"),
            (1.0, "b b"),
            (0.0, "world"),
        ]
        assert (await edge.post("/", {"query": "hello", "texts": TEXTS}))[1][0]["index"] == 1


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_a_ranking_has_the_form_of_cohere(path: str) -> None:
    documents = ["world", {"text": "a b a"}, "b b"]
    async with served() as edge:
        body = {"model": "m", "query": "hello", "documents": documents, "top_n": 2}
        status, answer, _ = await edge.post(path, body)
        assert status == 200
        first, second = answer["results"]
        assert first["document"] == {"text": "a b a"}
        assert (first["index"], second["index"]) == (1, 2)
        assert math.isclose(first["relevance_score"], probability(2.0))
        assert answer["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
        assert answer["model"] == "m"
        _, answer, _ = await edge.post(path, body | {"return_documents": False})
        assert all("document" not in one for one in answer["results"])


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("hello", "a b a", [2.0]),
        ("hello", TEXTS, RAW),
        (["hello"], TEXTS, RAW),
        (["hello", "a", "a b"], TEXTS, [0.0, 2.0, 2.0]),
    ],
)
async def test_scores_have_the_form_of_vllm(one: Any, other: Any, expected: list[float]) -> None:
    async with served() as edge:
        for path in ("/score", "/v1/score"):
            status, answer, _ = await edge.post(path, {"text_1": one, "text_2": other})
            assert status == 200
            assert [each["index"] for each in answer["data"]] == [*range(len(expected))]
            for each, raw in zip(answer["data"], expected, strict=True):
                assert math.isclose(each["score"], probability(raw))
        _, older, _ = await edge.post("/v1/score", {"text_1": one, "text_2": other})
        _, newer, _ = await edge.post("/v1/score", {"queries": one, "documents": other})
        assert newer["data"] == older["data"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/rerank", {"query": "hello"}, "either `documents` or `texts`"),
        ("/rerank", {"query": "a", "texts": ["b"], "documents": ["b"]}, "either `documents`"),
        ("/rerank", {"query": "", "texts": ["b"]}, "query: "),
        ("/rerank", {"query": "a", "texts": []}, "texts: "),
        ("/rerank", {"query": "a", "texts": ["b", ""]}, "cannot be empty"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n: "),
        ("/rerank", {"query": "a", "texts": ["b"] * 2049}, "at most 2048"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "`text_1` must have one text"),
        ("/v1/score", {"text_1": "a"}, "`text_2` is required"),
        ("/v1/score", {"text_1": "a", "text_2": "b " * 9}, "must have at most 8 tokens each"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(
    path: str, body: dict[str, Any], message: str
) -> None:
    async with served() as edge:
        status, answer, _ = await edge.post(path, body)
    assert status == 422
    assert message in str(answer)
    assert edge.batcher.requests == []


async def test_a_document_that_is_too_long_is_cut_and_the_query_stays() -> None:
    async with served() as edge:
        body = {"query": "hello world", "texts": ["a b " * 9], "truncate": True}
        assert (await edge.post("/rerank", body))[0] == 200
        body |= {"truncation_direction": "Left", "texts": ["a " * 9 + "b"]}
        assert (await edge.post("/rerank", body))[0] == 200
    found = [request.input_ids for request in edge.batcher.requests]
    assert found == [(2, 3, 6, 7, 6, 7, 6, 7), (2, 3, 6, 6, 6, 6, 6, 7)]


async def test_a_server_without_scores_says_how_to_get_them() -> None:
    async with served(Task.GENERATE, Task.EMBED) as edge:
        for path, body in (
            ("/rerank", {"query": "hello", "texts": ["a"]}),
            ("/v1/rerank", {"query": "hello", "documents": ["a"]}),
            ("/v1/score", {"text_1": "hello", "text_2": "a"}),
        ):
            status, answer, _ = await edge.post(path, body)
            assert status == 400
            assert (
                "runs with `--task embed,generate`, and this request needs `--task score`"
                in str(answer)
            )
