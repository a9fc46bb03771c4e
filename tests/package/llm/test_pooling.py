"""Embeddings and scores of a model of this process, against `transformers`, and of a server at a URL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from tests.package.programs import OpenAI

from millrace import LLM, AsyncLLM, RequestError
from millrace_testing.models.pooling_models import embeddings, save_reranker, scores
from millrace_testing.router.sse import served_application

TEXTS = ["What is a shard?", "a", "A router owns requests. " * 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reranker")
    save_reranker(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), task="embed,score", device="cpu", dtype="float32") as llm:
        yield llm


def test_embeddings_are_those_of_transformers(llm: LLM, folder: Path) -> None:
    found = torch.tensor(llm.embed(TEXTS, normalize=True))
    torch.testing.assert_close(found, embeddings(folder, TEXTS), atol=1e-4, rtol=0)
    (short,) = llm.embed(TEXTS[0], dimensions=8, normalize=True)
    torch.testing.assert_close(
        torch.tensor([short]), embeddings(folder, TEXTS[:1], dimensions=8), atol=1e-4, rtol=0
    )


def test_scores_are_those_of_transformers(llm: LLM, folder: Path) -> None:
    expected = scores(folder, TEXTS[0], TEXTS[1:])
    assert llm.score(TEXTS[0], TEXTS[1:]) == pytest.approx(expected, abs=1e-4)
    assert llm.score(TEXTS[:1], TEXTS[1]) == pytest.approx(expected[:1], abs=1e-4)


def test_what_is_wrong_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="`dimensions` must be <="):
        llm.embed("a", dimensions=10_000)
    with pytest.raises(RequestError, match="`text_1` must have one text"):
        llm.score(["a", "b"], ["a", "b", "c"])
    with pytest.raises(RequestError, match="cannot be empty"):
        llm.embed(["a", ""])
    with pytest.raises(RequestError, match="generate"):
        llm.generate("a")


async def test_a_server_is_asked_for_both() -> None:
    bodies: list[Any] = []

    def answering(field: str, values: list[Any]) -> Any:
        async def answer(request: web.Request) -> web.Response:
            bodies.append(await request.json())
            data = [{"index": index, field: value} for index, value in enumerate(values)]
            return web.json_response({"data": data[::-1]})

        return answer

    application = OpenAI(lambda body: "").application()
    application.router.add_post("/v1/embeddings", answering("embedding", [[0.0, 1.0], [1.0, 0.0]]))
    application.router.add_post("/v1/score", answering("score", [0.25, 0.5]))
    async with served_application(application) as url, AsyncLLM(url) as llm:
        assert await llm.embed(["a", (4, 5)], dimensions=2) == [[0.0, 1.0], [1.0, 0.0]]
        assert await llm.score("a", ["b", "c"]) == [0.25, 0.5]
    asked, scored = bodies
    assert asked["input"] == ["a", [4, 5]]
    assert (asked["model"], asked["dimensions"]) == ("the-model", 2)
    assert (scored["text_1"], scored["text_2"]) == ("a", ["b", "c"])
