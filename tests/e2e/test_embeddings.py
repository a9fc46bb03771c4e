"""Whole servers embed and score as transformers does: beside generations, on two ranks, over a killed shard."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from millrace_testing.launcher.e2e import END_SECONDS, Server, launch, until
from millrace_testing.models.pooling_models import (
    PROMPTS,
    embeddings,
    save_embedding,
    save_reranker,
    scores,
)

TOLERANCE = 1e-4
TEXTS = [
    "What is a shard?",
    "a",
    "A router owns requests, text and budgets. " * 20,
    "Grüße aus 東京",
    *(f"The block number {number} holds keys and values. " * number for number in range(1, 9)),
]
QUERY = "What is a block?"
NUM_RUNNING = 3
"""Prompts of the first step."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("embedding")
    save_embedding(path)
    return path


@pytest.fixture(scope="module")
def sharded(folder: Path) -> Iterator[Server]:
    flags = "--dtype=float32", "--num-shard=2", "--step-timeout=10", "--max-batch-prefill-tokens=64"
    with launch(f"--model-id={folder}", *flags) as server:
        yield server


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reranker")
    save_reranker(path)
    return path


@pytest.fixture(scope="module")
def mixed(reranker: Path) -> Iterator[Server]:
    """A server with all tasks; its model is a reranker."""
    flags = "--task=generate,embed,score", "--dtype=float32", "--deterministic=on"
    with launch(f"--model-id={reranker}", "--max-batch-prefill-tokens=96", *flags) as server:
        yield server


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=END_SECONDS)
    assert response.status_code == 200, response.text
    return response.json()


def check(found: list[list[float]], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.long
def test_embeddings_on_two_ranks_are_those_of_transformers(sharded: Server, folder: Path) -> None:
    check(post(sharded, "/embed", {"inputs": TEXTS}), embeddings(folder, TEXTS))
    answer = post(sharded, "/v1/embeddings", {"input": TEXTS, "dimensions": 24})
    check([one["embedding"] for one in answer["data"]], embeddings(folder, TEXTS, dimensions=24))
    answer = post(sharded, "/", {"inputs": TEXTS[:2], "prompt_name": "query"})
    check(answer, embeddings(folder, [PROMPTS["query"] + text for text in TEXTS[:2]]))


async def test_embeddings_go_on_over_a_killed_shard(sharded: Server, folder: Path) -> None:
    expected = embeddings(folder, TEXTS)
    async with httpx.AsyncClient(base_url=sharded.url, timeout=END_SECONDS) as client:
        undisturbed = (await client.post("/embed", json={"inputs": TEXTS})).json()

        replayed = sharded.metrics()["millrace_requests_replayed_total"]
        shard = sharded.shard
        shard.suspend()
        # A salt keeps the prompts out of the cache.
        body = {"inputs": TEXTS, "cache_salt": "new"}
        task = asyncio.create_task(client.post("/embed", json=body))
        await until(lambda: sharded.metrics()["millrace_requests_running"] >= NUM_RUNNING)
        shard.kill()
        answer = (await task).json()
    assert sharded.metrics()["millrace_requests_replayed_total"] >= replayed + NUM_RUNNING
    check(answer, expected)
    assert answer == undisturbed


async def test_all_tasks_share_steps_and_change_no_bit_of_each_other(mixed: Server) -> None:
    story = {"inputs": "What is a shard?", "parameters": {"max_new_tokens": 40, "details": True}}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/generate", story | {"inputs": text}) for text in TEXTS[:6]
    ]
    asked += [("/embed", {"inputs": text}) for text in TEXTS]
    asked += [("/rerank", {"query": QUERY, "texts": TEXTS, "raw_scores": True})]
    async with httpx.AsyncClient(base_url=mixed.url, timeout=END_SECONDS) as client:

        async def answer(path: str, body: dict[str, Any]) -> Any:
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            found = response.json()
            if path == "/generate":
                del found["details"]["cached_tokens"]
            return found

        together = await asyncio.gather(*(answer(*one) for one in asked))
        again = await asyncio.gather(*(answer(*one) for one in reversed(asked)))
        alone = [await answer(*one) for one in asked]
    assert together == alone
    assert again[::-1] == alone


def test_scores_match_transformers(mixed: Server, reranker: Path) -> None:
    assert httpx.get(f"{mixed.url}/info").json()["model_id"] == reranker.name
    expected = scores(reranker, QUERY, TEXTS)
    answer = post(mixed, "/v1/rerank", {"query": QUERY, "documents": TEXTS})
    found = {one["index"]: one["relevance_score"] for one in answer["results"]}
    assert [*found] == sorted(found, key=lambda index: expected[index], reverse=True)
    for index, score in found.items():
        assert score == pytest.approx(expected[index], abs=TOLERANCE)
    answer = post(mixed, "/v1/score", {"text_1": QUERY, "text_2": TEXTS})
    assert [one["score"] for one in answer["data"]] == [found[i] for i in range(len(TEXTS))]
    assert answer["usage"]["prompt_tokens"] > 0


def test_embedding_the_prompt_of_a_generation_hits_the_prefix_cache(mixed: Server) -> None:
    text = "Where does the router keep its blocks? " * 8
    post(mixed, "/generate", {"inputs": text, "parameters": {"max_new_tokens": 2}})
    response = httpx.post(f"{mixed.url}/embed", json={"inputs": text}, timeout=END_SECONDS)
    assert int(response.headers["x-cached-tokens"]) > 0
    salted = {"inputs": text, "cache_salt": "other"}
    fresh = httpx.post(f"{mixed.url}/embed", json=salted, timeout=END_SECONDS)
    assert int(fresh.headers["x-cached-tokens"]) == 0
    assert fresh.json() == response.json()


def test_info_lists_the_tasks_of_the_server(sharded: Server, mixed: Server) -> None:
    found = [httpx.get(f"{one.url}/info").json() for one in (sharded, mixed)]
    assert [one["tasks"] for one in found] == [["embed"], ["embed", "generate", "score"]]
    assert [one["hidden_size"] for one in found] == [64, 64]
    assert found[0]["model_pipeline_tag"] == "feature-extraction"
