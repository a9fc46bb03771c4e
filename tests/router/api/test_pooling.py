"""Routes of embeddings and scores over a batcher whose states are known."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from typing import Any

import pytest

from millrace_router.errors import GenerationError
from millrace_router.request.request import Task, ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_testing.router.edge import HIDDEN_SIZE, echo, limits_with, pooling_of, serving

PROMPTS = {"query": "hello ", "document": ""}


def serving_embeddings(*tasks: Task, **options: Any) -> Any:
    files = {"prompts": PROMPTS, **options.pop("files", {})}
    return serving(**{"pooling": pooling_of(*(tasks or (Task.EMBED,)), **files), **options})


def state(*ids: int) -> list[float]:
    """What `echo` yields for a prompt of these ids."""
    return [float(len(ids)), 2.0, float(ids[0])]


def normalised(values: list[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in values))
    return [value / length for value in values]


def close(found: list[float], expected: list[float]) -> bool:
    return len(found) == len(expected) and all(map(math.isclose, found, expected))


async def test_embeddings_have_the_form_of_openai() -> None:
    async with serving_embeddings() as edge:
        status, answer, response = await edge.post(
            "/v1/embeddings", {"input": "hello world", "model": "m"}
        )
    assert status == 200
    (one,) = answer.pop("data")
    assert close(one.pop("embedding"), normalised(state(2, 3)))
    assert one == {"object": "embedding", "index": 0}
    usage = {"prompt_tokens": 2, "total_tokens": 2}
    assert answer == {"object": "list", "model": "m", "usage": usage}
    assert response.headers["x-prompt-tokens"] == "2"
    assert response.headers["x-generated-tokens"] == "0"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hello", [(2,)]),
        (["hello", "a b"], [(2,), (6, 7)]),
        ([3, 2], [(3, 2)]),
        ([[3, 2], [5]], [(3, 2), (5,)]),
    ],
)
async def test_inputs_may_be_texts_ids_or_lists_of_them(
    given: Any, expected: list[tuple[int, ...]]
) -> None:
    async with serving_embeddings() as edge:
        _, openai, _ = await edge.post("/v1/embeddings", {"input": given})
        _, teis, _ = await edge.post("/embed", {"inputs": given})
    assert [one["index"] for one in openai["data"]] == [*range(len(expected))]
    for embedding, tei, ids in zip(openai["data"], teis, expected, strict=True):
        assert close(embedding["embedding"], normalised(state(*ids)))
        assert tei == embedding["embedding"]
    assert openai["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_base64_has_little_endian_float32() -> None:
    async with serving_embeddings() as edge:
        body = {"input": "hello world", "encoding_format": "base64"}
        _, answer, _ = await edge.post("/v1/embeddings", body)
    packed = base64.b64decode(answer["data"][0]["embedding"])
    found = struct.unpack(f"<{HIDDEN_SIZE}f", packed)
    assert [round(x, 6) for x in found] == [round(x, 6) for x in normalised(state(2, 3))]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed"])
async def test_dimensions_are_cut_and_normalised_again(path: str) -> None:
    name = "input" if path.startswith("/v1") else "inputs"
    async with serving_embeddings() as edge:
        _, answer, _ = await edge.post(path, {name: "hello", "dimensions": 2})
        found = answer["data"][0]["embedding"] if name == "input" else answer[0]
        assert close(found, normalised(state(2)[:2]))
        status, answer, _ = await edge.post(path, {name: "hello", "dimensions": 4})
        assert status == 422
        assert "`dimensions` must be <= 3" in str(answer)


@pytest.mark.parametrize("normalizes", [True, False])
async def test_the_model_decides_on_normalisation_unless_the_client_does(normalizes: bool) -> None:
    async with serving_embeddings(files={"normalizes": normalizes}) as edge:
        for wanted in (None, True, False):
            _, answer, _ = await edge.post("/embed", {"inputs": "hello", "normalize": wanted})
            raw = not normalizes if wanted is None else not wanted
            assert close(answer[0], state(2) if raw else normalised(state(2)))


async def test_a_state_of_zeros_stays_zero() -> None:
    def zeros(request: ValidRequest, stream: TokenStream) -> None:
        echo(request, stream)
        stream.pooled = [0.0, 0.0, 0.0]

    async with serving_embeddings(script=zeros) as edge:
        _, answer, _ = await edge.post("/embed", {"inputs": "hello"})
    assert answer == [[0.0, 0.0, 0.0]]


async def test_prompts_of_the_model_come_before_texts() -> None:
    async with serving_embeddings() as edge:
        _, answer, _ = await edge.post("/embed", {"inputs": "world", "prompt_name": "query"})
        assert close(answer[0], normalised(state(2, 3)))
        _, answer, _ = await edge.post("/embed", {"inputs": [3], "prompt_name": "query"})
        assert close(answer[0], normalised(state(3)))
        status, answer, _ = await edge.post("/embed", {"inputs": "a", "prompt_name": "title"})
        assert status == 422
        assert "`prompt_name` must be one of the model's prompts: document, query" in str(answer)
    async with serving_embeddings(files={"default_prompt_name": "query"}) as edge:
        _, answer, _ = await edge.post("/embed", {"inputs": "world"})
        assert close(answer[0], normalised(state(2, 3)))
        _, answer, _ = await edge.post("/embed", {"inputs": "world", "prompt_name": "document"})
        assert close(answer[0], normalised(state(3)))


async def test_prompts_that_are_too_long_are_refused_or_cut() -> None:
    long = "hello " + "world " * 8 + "a"
    async with serving_embeddings() as edge:
        status, answer, _ = await edge.post("/embed", {"inputs": long})
        assert status == 422
        assert "`inputs` must have at most 8 tokens each, or be truncated. Given: 10" in str(answer)
        for cut, expected in (
            ({"truncate": True}, state(2, *[3] * 7)),
            ({"truncate": True, "truncation_direction": "Left"}, state(*[3] * 7, 6)),
            ({"truncate_prompt_tokens": -1}, state(2, *[3] * 7)),
            ({"truncate_prompt_tokens": 2}, state(2, 3)),
            ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, state(3, 6)),
        ):
            _, answer, _ = await edge.post("/embed", {"inputs": long, **cut})
            assert close(answer[0], normalised(expected)), cut
        status, _, _ = await edge.post("/embed", {"inputs": "a", "truncate_prompt_tokens": 9})
        assert status == 422


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": ""}, "`input` cannot be empty"),
        ({"input": ["hello", ""]}, "`input` cannot be empty"),
        ({"input": []}, "at least 1 item"),
        ({"input": [[]]}, "at least 1 item"),
        ({"input": [9]}, "`input` contains token id 9"),
        ({"input": ["hello"] * 2049}, "`input` must have at most 2048 prompts. Given: 2049"),
        ({"input": "hello", "encoding_format": "int8"}, "'float' or 'base64'"),
        ({"input": "hello", "dimensions": 0}, "`dimensions` must be >= 1"),
    ],
)
async def test_wrong_embedding_bodies_are_refused_by_name(
    body: dict[str, Any], message: str
) -> None:
    async with serving_embeddings() as edge:
        status, answer, _ = await edge.post("/v1/embeddings", body)
    assert status == 422
    assert message in answer["error"]["message"]
    assert edge.batcher.requests == []


async def test_more_prompts_than_permits_run_one_after_the_other() -> None:
    async with serving_embeddings() as edge:
        status, answer, _ = await edge.post("/embed", {"inputs": [[3]] * 50})
        assert (status, len(answer)) == (200, 50)
        assert edge.services.infer.permits.taken == 0
        assert len(edge.batcher.requests) == 50


async def test_half_of_the_free_permits_are_left_to_others() -> None:
    async with serving_embeddings(script=None) as edge:
        asking = asyncio.create_task(edge.post("/embed", {"inputs": [[3]] * 50}))
        while len(edge.batcher.requests) < 2:
            await asyncio.sleep(0)
        assert edge.services.infer.permits.taken == 2
        while not asking.done():
            for request, stream in zip(edge.batcher.requests, edge.batcher.streams, strict=True):
                if not stream.ended:
                    echo(request, stream)
            await asyncio.sleep(0)
        assert (await asking)[0] == 200
        assert edge.services.infer.permits.taken == 0


async def test_a_full_server_answers_429_and_runs_nothing() -> None:
    async with serving_embeddings() as edge:
        edge.services.infer.permits.take(4)
        status, _, _ = await edge.post("/embed", {"inputs": [[3]] * 5})
        assert status == 429
        assert edge.batcher.requests == []


async def test_one_failure_ends_the_others() -> None:
    def script(request: ValidRequest, stream: TokenStream) -> None:
        if request.input_ids == (4,):
            stream.fail(GenerationError("no"))

    async with serving_embeddings(script=script) as edge:
        status, answer, _ = await edge.post("/embed", {"inputs": [[3], [4]]})
        assert (status, answer["error_type"]) == (424, "generation")
        assert all(stream.closed for stream in edge.batcher.streams)
        assert edge.services.infer.permits.taken == 0


async def test_a_client_that_leaves_ends_its_prompts() -> None:
    async with serving_embeddings(script=None) as edge:
        asking = asyncio.create_task(edge.post("/embed", {"inputs": [[3]] * 50}))
        await edge.batcher.arrived.wait()
        asking.cancel()
        await edge.batcher.closed.wait()
        await edge.services.infer.permits.all_free()
        assert all(stream.closed for stream in edge.batcher.streams)


async def test_an_answer_may_have_the_form_of_lorax() -> None:
    async with serving_embeddings() as edge:
        answer = await edge.answer("/embed", {"inputs": "hello", "parameters": {}})
    assert close(answer["embeddings"], normalised(state(2)))


async def test_a_server_for_embeddings_has_teis_route_at_its_root_and_generates_nothing() -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    async with serving_embeddings() as edge:
        answer = await edge.answer("/", {"inputs": "hello"})
        assert close(answer[0], normalised(state(2)))
        for path, body in (
            ("/generate", {"inputs": "hello"}),
            ("/generate_stream", {"inputs": "hello"}),
            ("/v1/completions", {"prompt": "hello"}),
            ("/v1/chat/completions", chat),
            ("/v1/messages", chat | {"max_tokens": 2}),
            ("/v1/responses", {"input": "hello"}),
            ("/invocations", {"inputs": "hello"}),
            ("/vertex", {"instances": [{"inputs": "hello"}]}),
            ("/rerank", {"query": "hello", "texts": ["a"]}),
            ("/v1/score", {"text_1": "hello", "text_2": "a"}),
        ):
            status, answer, _ = await edge.post(path, body)
            assert status == 400, path
            assert "its model runs with `--task embed`" in str(answer), path


async def test_a_generating_server_names_the_flag_for_embeddings() -> None:
    async with serving() as edge:
        for path, body in (
            ("/v1/embeddings", {"input": "hello"}),
            ("/embed", {"inputs": "hello"}),
        ):
            status, answer, _ = await edge.post(path, body)
            assert status == 400
            assert "this request needs `--task embed`" in str(answer)
        status, answer, _ = await edge.post("/", {"inputs": "hello"})
        assert (status, answer[0]["generated_text"]) == (200, "hello x x x")


async def test_one_server_does_both_tasks() -> None:
    limits = limits_with(max_total_tokens=16)
    async with serving_embeddings(Task.GENERATE, Task.EMBED, limits=limits) as edge:
        assert (await edge.post("/", {"inputs": "hello"}))[1][0]["generated_text"] == "hello x x x"
        assert (await edge.post("/embed", {"inputs": "hello"}))[0] == 200


async def test_metrics_and_the_key_are_as_for_generations() -> None:
    async with serving_embeddings(api_key="secret") as edge:
        assert (await edge.post("/embed", {"inputs": "hello"}))[0] == 401
        key = {"authorization": "Bearer secret"}
        body = {"inputs": ["hello", "a b"]}
        assert (await edge.post("/embed", body, headers=key))[0] == 200
        lines = (await edge.get("/metrics", headers=key))[1].decode().splitlines()
    assert "tgi_request_count 2" in lines
    assert "tgi_request_success 2" in lines
    assert "tgi_request_generated_tokens_sum 0" in lines


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


def serving_scores(*tasks: Task, **options: Any) -> Any:
    files = options.pop("files", {})
    pooling = pooling_of(*(tasks or (Task.SCORE,)), **files)
    return serving(**{"script": two_logits, "pooling": pooling, **options})


def probability(raw: float) -> float:
    return 1 / (1 + math.exp(-raw))


async def test_a_ranking_has_the_form_of_tei() -> None:
    async with serving_scores() as edge:
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
    async with serving_scores() as edge:
        body = {"model": "m", "query": "hello", "documents": documents, "top_n": 2}
        answer = await edge.answer(path, body)
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
    async with serving_scores() as edge:
        for path in ("/score", "/v1/score"):
            answer = await edge.answer(path, {"text_1": one, "text_2": other})
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
async def test_wrong_score_bodies_are_refused_by_name(
    path: str, body: dict[str, Any], message: str
) -> None:
    async with serving_scores() as edge:
        status, answer, _ = await edge.post(path, body)
    assert status == 422
    assert message in str(answer)
    assert edge.batcher.requests == []


async def test_a_document_that_is_too_long_is_cut_and_the_query_stays() -> None:
    async with serving_scores() as edge:
        body = {"query": "hello world", "texts": ["a b " * 9], "truncate": True}
        assert (await edge.post("/rerank", body))[0] == 200
        body |= {"truncation_direction": "Left", "texts": ["a " * 9 + "b"]}
        assert (await edge.post("/rerank", body))[0] == 200
    found = [request.input_ids for request in edge.batcher.requests]
    assert found == [(2, 3, 6, 7, 6, 7, 6, 7), (2, 3, 6, 6, 6, 6, 6, 7)]


async def test_a_server_without_scores_names_the_flag_for_scores() -> None:
    async with serving_scores(Task.GENERATE, Task.EMBED) as edge:
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
