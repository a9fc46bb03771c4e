"""Adapters on OpenAI's and Anthropic's routes: names of models, and the list of them."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import orjson
import pytest

from millrace_router.adapters.names import Registry
from millrace_router.adapters.resolver import ClientRules
from millrace_router.config import RouterConfig
from millrace_router.start.adapters import _register
from millrace_router.start.shards import StartupError
from millrace_testing.adapters.fake_fetcher import (
    A,
    B,
    FakeFetcher,
    Repository,
    adapters,
    digests,
    registered,
    resolver_of,
    version,
)
from millrace_testing.router.edge import Edge, limits_with, serving

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 16},
    "/v1/messages": CHAT,
}
TEMPLATE = "{{ messages[0].content }}"
OPEN = ClientRules(patterns=("hub:org/*",))


def serving_answers(**options: Any) -> AbstractAsyncContextManager[Edge]:
    """A server with room for the least answer of `/v1/responses`."""
    return serving(limits=limits_with(max_total_tokens=32), **options)


async def ids_of(edge: Edge, **headers: str) -> list[str]:
    _, body, _ = await edge.get("/v1/models", headers=headers)
    return [one["id"] for one in orjson.loads(body)["data"]]


@pytest.mark.parametrize("path", ROUTES)
async def test_a_model_may_be_an_adapter(path: str) -> None:
    async with serving_answers(adapters=adapters(), template=TEMPLATE) as edge:
        for name in ("a", "org/tiny:b", "org/tiny", "tgi", ""):
            body = await edge.answer(path, ROUTES[path] | {"model": name})
            assert body["model"] == (name if name not in {"tgi", ""} else "org/tiny")
        assert (await edge.post(path, ROUTES[path]))[0] == 200
        assert digests(edge) == [A.digest, B.digest, None, None, None, None]


@pytest.mark.parametrize("path", ROUTES)
async def test_a_long_name_is_not_repeated_in_every_chunk(path: str) -> None:
    async with serving_answers(template=TEMPLATE) as edge:
        body = ROUTES[path] | {"model": "m" * 10_000}
        assert (await edge.answer(path, body))["model"] == "m" * 256
        streamed = await edge.stream(path, body | {"stream": True})
        assert "m" * 256 in streamed
        assert "m" * 257 not in streamed


@pytest.mark.parametrize("path", ROUTES)
async def test_with_a_default_adapter_the_base_has_its_name(path: str) -> None:
    async with serving_answers(adapters=adapters(default="b"), template=TEMPLATE) as edge:
        for name in ("tgi", "", "org/tiny", "a"):
            assert (await edge.post(path, ROUTES[path] | {"model": name}))[0] == 200
        assert digests(edge) == [B.digest, B.digest, None, A.digest]


@pytest.mark.parametrize("path", [path for path in ROUTES if path != "/v1/messages"])
async def test_an_unknown_model_is_refused_with_adapters(path: str) -> None:
    async with serving_answers(adapters=adapters(), template=TEMPLATE) as edge:
        status, body, _ = await edge.post(path, ROUTES[path] | {"model": "gpt-4o"})
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        status, body, _ = await edge.post(path, ROUTES[path] | {"model": "org/tiny:none"})
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        assert body["error_type"] == "adapter_not_found"
        assert edge.batcher.requests == []
        assert 'tgi_request_failure{err="validation"} 2' in await edge.exposition()


async def test_an_unknown_model_has_anthropics_envelope() -> None:
    async with serving_answers(adapters=adapters(), template=TEMPLATE) as edge:
        status, body, _ = await edge.post("/v1/messages", CHAT | {"model": "claude"})
        assert (status, body["error"]["type"]) == (404, "not_found_error")


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({}, 200),
        ({"unknown_model": "refuse"}, 404),
        ({"adapters": adapters()}, 404),
        ({"adapters": adapters(), "unknown_model": "base"}, 200),
        ({"adapters": adapters(), "strict_tgi": True}, 200),
    ],
)
async def test_unknown_models_are_the_base_or_refused(options: dict[str, Any], status: int) -> None:
    async with serving_answers(template=TEMPLATE, **options) as edge:
        body = CHAT | {"model": "gpt-4o"}
        got, answer, _ = await edge.post("/v1/chat/completions", body)
        assert got == status
        if status == 200:
            assert answer["model"] == "gpt-4o"
            assert digests(edge) == [None]


@pytest.mark.parametrize("unknown_model", ["base", "refuse"])
async def test_a_name_that_was_an_adapter_is_never_the_base(unknown_model: str) -> None:
    resolver = adapters(rules=OPEN)
    resolver.registry.remove("b")
    async with serving_answers(
        adapters=resolver, template=TEMPLATE, unknown_model=unknown_model
    ) as edge:
        for name in ("b", f"b@sha256:{B.digest}", "org/none"):
            status, body, _ = await edge.post("/v1/chat/completions", CHAT | {"model": name})
            assert (status, body["error"]["code"]) == (404, "model_not_found")
        assert edge.batcher.requests == []


async def test_a_model_name_may_pin_the_version_of_an_adapter() -> None:
    async with serving_answers(adapters=adapters(), template=TEMPLATE) as edge:
        body = CHAT | {"model": f"a@sha256:{A.digest}"}
        assert (await edge.post("/v1/chat/completions", body))[0] == 200
        body = CHAT | {"model": f"a@sha256:{B.digest}"}
        assert (await edge.post("/v1/chat/completions", body))[0] == 404
        assert digests(edge) == [A.digest]


async def test_chats_take_adapter_fields_of_lorax_and_sglang() -> None:
    private = Repository("P", tokens=frozenset({"good"}))
    fetcher = FakeFetcher(hub={"org/a": Repository("A"), "org/p": private})
    resolver = resolver_of(fetcher, registered("a", "org/a"), rules=OPEN)
    async with serving_answers(adapters=resolver, template=TEMPLATE) as edge:
        path = "/v1/chat/completions"
        own = {"model": "org/p", "adapter_source": "hub", "api_token": "good"}
        assert (await edge.post(path, CHAT | own))[0] == 200
        assert (await edge.post(path, CHAT | {"lora_path": "a"}))[0] == 200
        assert (await edge.post(path, CHAT | {"model": "org/tiny", "lora_path": "a"}))[0] == 200
        assert (await edge.post(path, CHAT | {"lora_path": "org/a"}))[0] == 404
        status, body, _ = await edge.post(path, CHAT | {"model": "x", "adapter_source": "s3"})
        assert (status, "s3 is not supported" in body["error"]["message"]) == (422, True)
    assert digests(edge) == [version("", "P None").digest, A.digest, A.digest]


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_with_fields_of_lorax_get_its_headers(*, stream: bool) -> None:
    names = ("x-adapter-id", "x-adapter-source", "x-model-id")
    bodies = {
        "/v1/chat/completions": CHAT,
        "/v1/completions": {"prompt": "a", "max_tokens": 1},
    }
    async with serving_answers(adapters=adapters(), template=TEMPLATE) as edge:
        for path, body in bodies.items():
            for fields, expected in (
                ({"model": "a", "api_token": None}, ("a", "hub", "org/tiny")),
                ({"model": "org/tiny:b", "adapter_source": None}, ("b", "hub", "org/tiny")),
                ({"model": "tgi", "api_token": None}, (None, None, "org/tiny")),
                ({"model": "a"}, (None, None, None)),
            ):
                asked = {**body, **fields, "stream": stream}
                status, _, response = await edge.post(path, asked)
                assert status == 200
                assert tuple(map(response.headers.get, names)) == expected


async def test_several_choices_and_prompts_share_an_adapter() -> None:
    async with serving_answers(adapters=adapters(), template=TEMPLATE) as edge:
        await edge.post("/v1/chat/completions", CHAT | {"model": "a", "n": 2})
        await edge.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1, "model": "b"})
        assert digests(edge) == [A.digest, A.digest, B.digest, B.digest]


async def test_vertex_and_kserve_have_adapters() -> None:
    async with serving_answers(adapters=adapters(), template=TEMPLATE) as edge:
        text = {"inputs": "hello", "parameters": {"max_new_tokens": 1, "adapter_id": "a"}}
        await edge.post("/vertex", {"instances": [text, CHAT | {"model": "b"}]})
        assert sorted(map(str, digests(edge))) == sorted([A.digest, B.digest])
        tensor = {"name": "in", "shape": [1], "datatype": "BYTES", "data": ["hello"]}
        body = {"inputs": [tensor], "parameters": text["parameters"]}
        assert (await edge.post("/v2/models/any/infer", body))[0] == 200
        assert digests(edge)[-1] == A.digest


async def test_the_list_of_models_has_adapters_with_root_and_parent(tmp_path: Path) -> None:
    resolver = resolver_of(FakeFetcher(), registered("a", "org/a"), registered("b", tmp_path / "v"))
    async with serving_answers(adapters=resolver) as edge:
        _, body, _ = await edge.get("/v1/models")
        base, a, b = orjson.loads(body)["data"]
        assert (base["id"], "root" in base, "parent" in base) == ("org/tiny", False, False)
        assert (a["id"], a["root"], a["parent"]) == ("a", "org/a", "org/tiny")
        # No path of the server.
        assert (b["id"], b["root"], b["parent"]) == ("b", "v", "org/tiny")
        status, body, _ = await edge.get("/v1/models/b")
        assert (status, orjson.loads(body)) == (200, b)
        assert (await edge.get("/v1/models/c"))[0] == 404


async def test_only_clients_with_the_key_see_names_of_adapters() -> None:
    async with serving_answers(adapters=adapters(), api_key="key") as edge:
        assert await ids_of(edge) == ["org/tiny"]
        assert await ids_of(edge, authorization="Bearer wrong") == ["org/tiny"]
        assert await ids_of(edge, authorization="Bearer key") == ["org/tiny", "a", "b"]


async def test_private_ids_are_listed_only_for_clients_with_access() -> None:
    fetcher = FakeFetcher(hub={"org/p": Repository(tokens=frozenset({"good"}))})
    async with serving_answers(
        adapters=resolver_of(fetcher, rules=OPEN), template=TEMPLATE
    ) as edge:
        token = {"x-adapter-token": "good"}
        assert await ids_of(edge, **token) == ["org/tiny"]
        body = CHAT | {"model": "org/p"}
        assert (await edge.post("/v1/chat/completions", body, headers=token))[0] == 200
        assert await ids_of(edge, **token) == ["org/tiny", "org/p"]
        assert await ids_of(edge) == ["org/tiny"]
        assert await ids_of(edge, **{"x-adapter-token": "bad"}) == ["org/tiny"]


NAMES = ("chat-large", "gpt-4:turbo")


def serving_names(**options: Any) -> Any:
    return serving_answers(served_model_name=NAMES, template="hello", **options)


async def test_every_name_is_listed_and_described() -> None:
    async with serving_names() as edge:
        assert await ids_of(edge) == list(NAMES)
        for name in NAMES:
            status, body, _ = await edge.get(f"/v1/models/{name}")
            assert (status, orjson.loads(body)["id"]) == (200, name)
        assert (await edge.get("/v1/models/org/tiny"))[0] == 404
        assert orjson.loads((await edge.get("/info"))[1])["model_id"] == "org/tiny"
    async with serving() as edge:
        assert await ids_of(edge) == ["org/tiny"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        ("tgi", NAMES[0]),
        (NAMES[0], NAMES[0]),
        (NAMES[1], NAMES[1]),
        ("org/tiny", "org/tiny"),
        ("any", "any"),
    ],
)
async def test_answers_have_the_requested_name_or_the_first(
    path: str, asked: str, answered: str
) -> None:
    async with serving_names() as edge:
        status, body, _ = await edge.post(path, ROUTES[path] | {"model": asked})
        assert (status, body["model"]) == (200, answered)


async def test_all_names_are_served_where_others_are_refused() -> None:
    async with serving_names(unknown_model="refuse") as edge:
        for name in (*NAMES, "org/tiny", "tgi"):
            assert (await edge.post("/v1/chat/completions", CHAT | {"model": name}))[0] == 200
        for name in ("gpt-4", "gpt-4:", "other"):
            assert (await edge.post("/v1/chat/completions", CHAT | {"model": name}))[0] == 404


def test_no_adapter_has_one_of_the_names() -> None:
    flags = ("--model-folder=/m", "--served-model-name=a,b", "--lora-modules=b=/x")
    with pytest.raises(StartupError, match="the LoRA adapter b has the name of the model"):
        _register(RouterConfig.from_args(flags), Registry())
