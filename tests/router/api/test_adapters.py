"""Adapters on TGI's routes, LoRAX's and SGLang's fields, and the routes that load and unload them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from millrace_router.adapters.resolver import ClientRules
from millrace_router.errors import (
    AdapterForbidden,
    AdapterInvalid,
    AdapterTooLarge,
    AdapterUnavailable,
    GenerationError,
    RouterError,
)
from millrace_router.request.adapter import MergeRecipe, MergeStrategy, SignMethod
from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import TokenStream
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
    write_adapter,
)
from millrace_testing.router.edge import Edge, echo, play, serving, token_event

PATHS = ["/generate", "/generate_stream", "/"]
LORAX_CLIENT: dict[str, Any] = {
    "adapter_id": "a",
    "adapter_source": None,
    "merged_adapters": None,
    "api_token": None,
    "best_of": None,
    "decoder_input_details": False,
    "details": True,
    "do_sample": False,
    "ignore_eos_token": False,
    "max_new_tokens": 2,
    "repetition_penalty": None,
    "frequency_penalty": None,
    "response_format": None,
    "return_full_text": False,
    "return_k_alternatives": None,
    "seed": None,
    "stop": [],
    "temperature": None,
    "top_k": None,
    "top_p": None,
    "truncate": None,
    "typical_p": None,
    "watermark": False,
}
"""The fields that lorax-client 0.6 sends, nulls included."""


def asked(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "hello", "parameters": {"max_new_tokens": 2, **parameters}}


@pytest.mark.parametrize("path", PATHS)
async def test_a_request_gets_the_adapter_that_it_names(path: str) -> None:
    async with serving(adapters=adapters()) as edge:
        for fields in ({"adapter_id": "a"}, {"lora_path": "b"}, {}, {"adapter_id": ""}):
            assert (await edge.post(path, asked(**fields)))[0] == 200
        # The base's own name is not an adapter.
        assert (await edge.post(path, asked(adapter_id="org/tiny")))[0] == 200
        assert digests(edge) == [A.digest, B.digest, None, None, None]
        lines = await edge.exposition()
    assert 'millrace_adapter_requests_total{adapter="a"} 1' in lines
    assert 'millrace_adapter_requests_total{adapter="b"} 1' in lines


async def test_best_of_shares_an_adapter() -> None:
    async with serving(adapters=adapters()) as edge:
        await edge.post("/generate", asked(adapter_id="a", best_of=2, do_sample=True))
        assert digests(edge) == [A.digest, A.digest]


async def test_requests_that_name_no_adapter_get_the_default_adapter() -> None:
    async with serving(adapters=adapters(default="b")) as edge:
        for fields in ({}, {"adapter_id": None}, {"adapter_id": "a"}, {"adapter_id": "org/tiny"}):
            await edge.post("/generate", asked(**fields))
        assert digests(edge) == [B.digest, B.digest, A.digest, None]


async def test_an_estimate_is_for_the_adapter() -> None:
    async with serving(adapters=adapters()) as edge:
        assert (await edge.post("/v1/estimate", asked(adapter_id="a")))[0] == 200
        assert [one.adapter for one in edge.batcher.estimated] == [A]
        assert (await edge.post("/v1/estimate", asked(adapter_id="none")))[0] == 404


FAILURES: list[tuple[RouterError, int, str]] = [
    (AdapterForbidden("a"), 403, "adapter_forbidden"),
    (AdapterInvalid("a", "use_dora"), 422, "validation"),
    (AdapterTooLarge("a", num_bytes=2, limit=1), 413, "validation"),
    (AdapterUnavailable("a", "down", retry_after_seconds=2.5), 503, "unavailable"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("error", "status", "kind"), FAILURES)
async def test_failures_of_adapters_have_their_status(
    error: RouterError, status: int, kind: str, path: str
) -> None:
    async with serving(adapters=adapters(FakeFetcher(error=error))) as edge:
        got, body, response = await edge.post(path, asked(adapter_id="a"))
        assert (got, body) == (status, {"error": str(error), "error_type": kind})
        assert response.headers.get("retry-after") == ("3" if status == 503 else None)
        # Nobody else notices.
        assert (await edge.post(path, asked()))[0] == 200
        assert edge.services.infer.permits.taken == 0


@pytest.mark.parametrize("with_lora", [True, False])
async def test_an_unknown_adapter_is_not_the_base(*, with_lora: bool) -> None:
    resolver = adapters() if with_lora else None
    async with serving(adapters=resolver) as edge:
        for fields in ({"adapter_id": "c"}, {"lora_path": "c"}, {"lora_path": "/models/a"}):
            status, body, _ = await edge.post("/generate", asked(**fields))
            assert (status, body["error_type"]) == (404, "adapter_not_found")
        merged = {"ids": ["a", "c"], "merge_strategy": "cat"}
        status, body, _ = await edge.post("/generate", asked(merged_adapters=merged))
        assert status == 404
        assert edge.batcher.requests == []


async def test_with_strict_tgi_an_unknown_adapter_is_the_base_unless_it_was_one() -> None:
    resolver = adapters()
    resolver.registry.remove("b")
    async with serving(adapters=resolver, strict_tgi=True) as edge:
        assert (await edge.post("/generate", asked(adapter_id="c")))[0] == 200
        assert (await edge.post("/generate", asked(adapter_id="a")))[0] == 200
        assert (await edge.post("/generate", asked(adapter_id="b")))[0] == 404
        assert digests(edge) == [None, A.digest]


MERGED = {"ids": ["a", "b"], "weights": [0.25, 0.75]}


@pytest.mark.parametrize(
    ("given", "recipe"),
    [
        ({}, {}),
        ({"weights": None}, {"weights": (1.0, 1.0)}),
        # What lorax-client sends: nulls, and a density that linear does not read.
        (
            {"merge_strategy": None, "density": 0.0, "majority_sign_method": None},
            {},
        ),
        ({"merge_strategy": "cat"}, {"strategy": MergeStrategy.CAT}),
        (
            {"merge_strategy": "ties", "density": 0.5, "majority_sign_method": "frequency"},
            {
                "strategy": MergeStrategy.TIES,
                "density": 0.5,
                "majority_sign_method": SignMethod.FREQUENCY,
            },
        ),
        (
            {"merge_strategy": "dare_linear", "density": 1.0},
            {"strategy": MergeStrategy.DARE_LINEAR},
        ),
    ],
)
async def test_several_adapters_are_merged(given: dict[str, Any], recipe: dict[str, Any]) -> None:
    fetcher = FakeFetcher(hub={"org/a": Repository("A"), "org/b": Repository("B")})
    async with serving(adapters=adapters(fetcher)) as edge:
        await edge.answer("/generate", asked(merged_adapters=MERGED | given))
    usual: dict[str, Any] = {"ids": ("a", "b"), "weights": (0.25, 0.75)}
    assert fetcher.merged == [(MergeRecipe(**usual | recipe), (A.digest, B.digest))]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"adapter_id": "a", "merged_adapters": MERGED},
            "at most one of `adapter_id` or `adapters` may be provided",
        ),
        (
            {"merged_adapters": {"ids": []}},
            "at least one adapter ID must be provided when setting `adapters`",
        ),
        (
            {"merged_adapters": {"ids": None, "weights": [1]}},
            "at least one adapter ID must be provided when setting `adapters`",
        ),
        (
            {"merged_adapters": {"ids": ["a"], "weights": [1, 2]}},
            "number of adapter IDs must match number of adapter weights",
        ),
        ({"merged_adapters": {"ids": ["a"] * 33}}, "`ids` must be at most 32. Given: 33"),
        (
            {"merged_adapters": MERGED | {"merge_strategy": "svd"}},
            "`merge_strategy` must be one of `cat`, `linear`, `ties`, `dare_linear`, `dare_ties`",
        ),
        (
            {"merged_adapters": MERGED | {"merge_strategy": "ties"}},
            "`density` must be > 0.0 and <= 1.0 with the strategy `ties`",
        ),
        (
            {"merged_adapters": MERGED | {"merge_strategy": "dare_ties", "density": 0.0}},
            "`density` must be > 0.0 and <= 1.0 with the strategy `dare_ties`",
        ),
        (
            {"merged_adapters": MERGED | {"majority_sign_method": "most"}},
            "`majority_sign_method` must be `total` or `frequency`",
        ),
        (
            {"adapter_id": "a", "adapter_source": "s3"},
            "`adapter_source` s3 is not supported: adapters come from `hub` or `local`",
        ),
        (
            {"adapter_id": "a", "adapter_source": "pbase"},
            "`adapter_source` pbase is not supported: adapters come from `hub` or `local`",
        ),
        ({"adapter_source": "ftp"}, "`adapter_source` must be `hub` or `local`"),
        ({"adapter_id": "a\nb"}, "the name of an adapter must not have control characters"),
        ({"merged_adapters": {"ids": ["a\x00"]}}, "the name of an adapter must not have control"),
        ({"adapter_id": "a", "api_token": "a\nb"}, "the token for adapters is not a token"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
async def test_wrong_adapter_fields_are_refused(
    path: str, fields: dict[str, Any], message: str
) -> None:
    async with serving(adapters=adapters()) as edge:
        status, body, _ = await edge.post(path, asked(**fields))
        assert (status, body["error_type"]) == (422, "validation")
        assert body["error"].startswith(f"Input validation error: {message}")
        assert edge.batcher.requests == []
        assert 'tgi_request_failure{err="validation"} 1' in await edge.exposition()


def with_candidates(request: ValidRequest, stream: TokenStream) -> None:
    if request.top_n_tokens:
        stream.token(token_event(1, " x", y=-1.5))
    echo(request, stream)


async def test_answers_have_the_fields_that_the_client_of_lorax_needs() -> None:
    async with serving(adapters=adapters()) as edge:
        body = {"inputs": "hello world", "parameters": LORAX_CLIENT}
        status, (answer,), response = await edge.post("/", body | {"stream": False})
        assert status == 200
        details = answer["details"]
        assert (details["prompt_tokens"], details["skipped_tokens"]) == (2, 0)
        assert [token["skipped"] for token in details["tokens"]] == [False, False]
        assert all("alternative_tokens" not in token for token in details["tokens"])
        expected = {"x-adapter-id": "a", "x-adapter-source": "hub", "x-model-id": "org/tiny"}
        assert {name: response.headers[name] for name in expected} == expected
        status, text, response = await edge.post("/", body | {"stream": True})
        events = [json.loads(line[5:]) for line in text.split("\n\n") if line]
        assert [event["token"]["skipped"] for event in events] == [False, False]
        assert events[-1]["details"]["prompt_tokens"] == 2
        assert {name: response.headers[name] for name in expected} == expected
        assert digests(edge) == [A.digest, A.digest]


async def test_candidates_have_the_form_of_lorax() -> None:
    async with serving(with_candidates, adapters=adapters()) as edge:
        fields = {"return_k_alternatives": 1, "details": True}
        _, body, _ = await edge.post("/generate", asked(**fields))
        token = body["details"]["tokens"][0]
        assert token["alternative_tokens"] == [{"id": 9, "text": "y", "logprob": -1.5}]
        _, text, _ = await edge.post("/generate_stream", asked(**fields))
        event = json.loads(text.split("\n\n")[0][5:])
        assert event["token"]["alternative_tokens"] == [{"id": 9, "text": "y", "logprob": -1.5}]
        assert [one.top_n_tokens for one in edge.batcher.requests] == [1, 1]


@pytest.mark.parametrize("path", PATHS)
async def test_tgis_answers_are_as_they_were(path: str) -> None:
    async with serving(adapters=adapters()) as edge:
        _, body, response = await edge.post(path, asked(adapter_id="a", details=True))
    assert "skipped" not in str(body)
    assert "prompt_tokens" not in str(body)
    assert not {"x-adapter-id", "x-adapter-source", "x-model-id"} & {*response.headers}


async def test_headers_hold_any_name_and_all_names() -> None:
    fetcher = FakeFetcher(hub={"org/a": Repository("A")})
    name = "stimme, größer"
    resolver = resolver_of(fetcher, registered(name, "org/a"), registered("b", "org/a"))
    async with serving(adapters=resolver) as edge:
        _, _, response = await edge.post("/generate", asked(adapter_id=name, api_token=None))
        assert response.headers["x-adapter-id"] == "stimme%2C gr%C3%B6%C3%9Fer"
        merged = {"ids": [name, "b"]}
        _, _, response = await edge.post("/generate", asked(merged_adapters=merged))
        assert response.headers["x-adapter-id"] == "stimme%2C gr%C3%B6%C3%9Fer,b"
        _, _, response = await edge.post("/generate", asked(api_token=None))
        assert "x-adapter-id" not in response.headers


async def test_a_schema_may_have_the_form_of_lorax() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    async with serving() as edge:
        for given in (
            {"response_format": {"type": "json_object", "schema": schema}},
            {"grammar": {"type": "json", "value": schema}},
        ):
            assert (await edge.post("/generate", asked(**given)))[0] == 200
    one, other = (request.grammar for request in edge.batcher.requests)
    assert one is not None
    assert one == other


async def test_the_clients_own_token_opens_a_private_adapter() -> None:
    fetcher = FakeFetcher(hub={"org/p": Repository(tokens=frozenset({"good"}))})
    resolver = resolver_of(fetcher, rules=ClientRules(patterns=("hub:org/*",)))
    async with serving(adapters=resolver, api_key="key") as edge:

        async def ask(header: str | None = None, **fields: Any) -> tuple[int, str]:
            headers = {"authorization": "Bearer key"}
            if header is not None:
                headers["x-adapter-token"] = header
            body = asked(adapter_id="org/p", **fields)
            status, answer, _ = await edge.post("/generate", body, headers=headers)
            return status, answer.get("error_type", "")

        # The server's own key is no token for the hub.
        assert await ask() == (404, "adapter_not_found")
        assert await ask("bad") == (403, "adapter_forbidden")
        assert await ask("good") == (200, "")
        assert await ask(api_token="good") == (200, "")
        assert await ask("bad", api_token="good") == (200, "")
        assert await ask() == (404, "adapter_not_found")
    assert "key" not in {token for _, token in (*fetcher.fetched, *fetcher.asked)}


async def test_a_repetition_with_another_token_is_another_request() -> None:
    fetcher = FakeFetcher(hub={"org/p": Repository(tokens=frozenset({"good"}))})
    resolver = resolver_of(fetcher, rules=ClientRules(patterns=("hub:org/*",)))
    async with serving(adapters=resolver, resume_grace=60) as edge:
        body = asked(adapter_id="org/p")
        headers = {"idempotency-key": "k"}
        first = await edge.post("/generate", body, headers=headers | {"x-adapter-token": "good"})
        again = await edge.post("/generate", body, headers=headers | {"x-adapter-token": "good"})
        assert (first[0], again[0], len(edge.batcher.requests)) == (200, 200, 1)
        assert (await edge.post("/generate", body, headers=headers))[0] == 404


async def test_an_adapter_is_in_use_until_its_requests_end() -> None:
    async with serving(None, adapters=adapters()) as edge:
        infer = edge.services.infer
        asking = [
            asyncio.create_task(edge.post("/generate", asked(adapter_id=name)))
            for name in ("a", "a", "b")
        ]
        while len(edge.batcher.streams) < 3:
            await asyncio.sleep(0)
        assert infer.adapters_in_use() == {A.digest, B.digest}
        by_digest = zip(digests(edge), edge.batcher.streams, strict=True)
        first, *rest = [stream for digest, stream in by_digest if digest == A.digest]
        play(first, " x")
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        assert infer.adapters_in_use() == {A.digest, B.digest}
        play(rest[0], " x")
        await asyncio.wait([one for one in asking if not one.done()], return_when="FIRST_COMPLETED")
        assert infer.adapters_in_use() == {B.digest}
        for stream in edge.batcher.streams:
            stream.fail(GenerationError("no"))
        await asyncio.gather(*asking)
        assert infer.adapters_in_use() == frozenset()


@pytest.mark.parametrize(
    ("fairness", "tenants"),
    [("none", ["", "", ""]), ("adapter", ["a", "b", ""]), ("tenant", ["me", "me", "me"])],
)
async def test_adapters_may_share_the_server_equally(fairness: str, tenants: list[str]) -> None:
    async with serving(adapters=adapters(), fairness=fairness) as edge:
        for fields in ({"adapter_id": "a"}, {"adapter_id": "b"}, {}):
            await edge.post("/generate", asked(**fields), headers={"x-tenant": "me"})
        assert [one.scheduling.tenant for one in edge.batcher.requests] == tenants


async def test_headers_of_whole_answers_have_lorax_s_times() -> None:
    names = {
        "x-skipped-tokens",
        "x-total-tokens",
        "x-time-to-first-token",
        "x-time-per-output-token",
    }
    async with serving() as edge:
        for fields, expected in (({"api_token": None}, names), ({}, set())):
            body = {"inputs": "hello", "parameters": {"max_new_tokens": 3, **fields}}
            _, _, response = await edge.post("/generate", body)
            assert {name.lower() for name in response.headers} & names == expected
            if expected:
                assert response.headers["x-total-tokens"] == "4"
                assert response.headers["x-skipped-tokens"] == "0"
                assert response.headers["x-time-to-first-token"].isdecimal()


async def test_a_text_may_be_a_turn_of_a_chat() -> None:
    body = {"inputs": "hello", "parameters": {"apply_chat_template": True}}
    template = "a {{ messages[0].content }} {% if add_generation_prompt %}b{% endif %}"
    async with serving(template=template) as edge:
        for path in ("/generate", "/generate_stream"):
            _ = await edge.answer(path, body)
            expected = edge.services.tokenizer.encode("a hello b", add_special_tokens=False)
            assert edge.batcher.requests[-1].input_ids == expected
    async with serving() as edge:
        status, answer, _ = await edge.post("/generate", body)
        assert (status, answer["error_type"]) == (422, "template_error")


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BOSS = {"authorization": "Bearer boss"}


async def post(edge: Edge, path: str, **body: Any) -> tuple[int, Any]:
    status, answer, _ = await edge.post(path, body, headers=BOSS)
    return status, answer


async def digest_of(edge: Edge, name: str) -> str | None:
    """The version that a request for `name` gets."""
    await edge.post("/generate", {"inputs": "hello", "parameters": {"adapter_id": name}})
    used = edge.batcher.requests[-1].adapter
    return used.digest if used else None


async def listed(edge: Edge) -> list[dict[str, Any]]:
    _, body, _ = await edge.get("/adapters", headers=BOSS)
    found: list[dict[str, Any]] = orjson.loads(body)["adapters"]
    return found


async def test_an_adapter_is_loaded_replaced_and_unloaded(tmp_path: Path) -> None:
    write_adapter(tmp_path / "one", "one")
    write_adapter(tmp_path / "two", "two")
    one, two = version("", "one").digest, version("", "two").digest
    async with serving(adapters=resolver_of(FakeFetcher()), admin_key="boss") as edge:
        path = str(tmp_path / "one")
        loaded = await post(edge, LOAD, lora_name="voice", lora_path=path)
        assert loaded == (200, "Success: LoRA adapter 'voice' added successfully.")
        assert await digest_of(edge, "voice") == one
        status, body = await post(edge, LOAD, lora_name="voice", lora_path=path)
        assert (status, body["error"]["type"]) == (400, "InvalidUserInput")
        assert body["error"]["message"] == (
            "The lora adapter 'voice' has already been loaded. If you want to load the adapter in"
            " place, set 'load_inplace' to True."
        )
        fields = {"lora_name": "voice", "lora_path": str(tmp_path / "two")}
        assert (await post(edge, LOAD, **fields, load_inplace=True))[0] == 200
        assert await digest_of(edge, "voice") == two
        assert await digest_of(edge, f"voice@sha256:{one}") == one
        assert await listed(edge) == [
            {
                "name": "voice",
                "source": "local",
                "path": str(tmp_path / "two"),
                "revision": None,
                "digest": two,
                "versions": [two, one],
                "is_default": False,
            }
        ]
        unloaded = await post(edge, UNLOAD, lora_name="voice", lora_int_id=None)
        assert unloaded == (200, "Success: LoRA adapter 'voice' removed successfully.")
        asked = {"inputs": "hello", "parameters": {"adapter_id": "voice"}}
        status, body, _ = await edge.post("/generate", asked)
        assert (status, body["error"]) == (404, "The adapter 'voice' has been unloaded")
        assert await listed(edge) == []


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (LOAD, {}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        (
            LOAD,
            {"lora_name": "a", "lora_path": ""},
            400,
            "Both 'lora_name' and 'lora_path' must be provided.",
        ),
        (LOAD, {"lora_name": "a", "lora_path": "org/none"}, 404, "The adapter 'a' does not exist"),
        (
            LOAD,
            {"lora_name": "a", "lora_path": "neither"},
            400,
            "'neither' is neither a folder nor an id on the hub",
        ),
        (
            LOAD,
            {"lora_name": "a\n", "lora_path": "org/a"},
            400,
            "Input validation error: the name of an adapter must not have control characters",
        ),
        (
            LOAD,
            {"lora_name": "org/tiny", "lora_path": "org/a"},
            400,
            "'org/tiny' is the name of the base model.",
        ),
        (
            UNLOAD,
            {"lora_int_id": 1},
            400,
            "'lora_name' needs to be provided to unload a LoRA adapter.",
        ),
        (UNLOAD, {"lora_name": "x"}, 404, "The lora adapter 'x' cannot be found."),
    ],
)
async def test_wrong_calls_are_refused(
    path: str, body: dict[str, Any], status: int, message: str
) -> None:
    kind = {400: "InvalidUserInput", 404: "NotFoundError"}[status]
    async with serving(adapters=resolver_of(FakeFetcher()), admin_key="boss") as edge:
        got, answer = await post(edge, path, **body)
        assert (got, answer["error"]["type"]) == (status, kind)
        assert answer["error"]["message"] == message


async def test_a_failed_fetch_keeps_the_former_adapter() -> None:
    fetcher = FakeFetcher(hub={"org/a": Repository("A")})
    async with serving(adapters=resolver_of(fetcher), admin_key="boss") as edge:
        body = {"lora_name": "a", "lora_path": "org/a"}
        await post(edge, LOAD, **body)
        for error, status in (
            (AdapterInvalid("a", "DoRA"), 400),
            (AdapterUnavailable("a", "down"), 503),
        ):
            fetcher.error = error
            assert (await post(edge, LOAD, **body, load_inplace=True))[0] == status
        assert await digest_of(edge, "a") == version("", "A None").digest


async def test_a_reload_retries_a_fetch_that_failed_a_moment_ago() -> None:
    fetcher = FakeFetcher(error=AdapterInvalid("a", "DoRA"), hub={"org/a": Repository()})
    async with serving(adapters=resolver_of(fetcher), admin_key="boss") as edge:
        body = {"lora_name": "a", "lora_path": "org/a"}
        assert (await post(edge, LOAD, **body))[0] == 400
        fetcher.error = None
        assert (await post(edge, LOAD, **body))[0] == 200


async def test_answers_have_the_form_of_sglang() -> None:
    fetcher = FakeFetcher(hub={"org/a": Repository()})
    async with serving(adapters=resolver_of(fetcher), admin_key="boss") as edge:
        body = {"lora_name": "a", "lora_path": "org/a", "pinned": False}
        done = {"success": True, "error_message": None, "loaded_adapters": {"a": "org/a"}}
        assert await post(edge, "/load_lora_adapter", **body) == (200, done)
        status, answer = await post(edge, "/load_lora_adapter", **body)
        assert (status, answer["success"]) == (400, False)
        assert "already been loaded" in answer["error_message"]
        done = {"success": True, "error_message": None, "loaded_adapters": {}}
        assert await post(edge, "/unload_lora_adapter", lora_name="a") == (200, done)


ROUTES = [
    ("POST", LOAD),
    ("POST", UNLOAD),
    ("POST", "/load_lora_adapter"),
    ("POST", "/unload_lora_adapter"),
    ("GET", "/adapters"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("api_key", [None, "key"])
async def test_only_the_admin_key_opens_the_adapter_routes(
    method: str, path: str, api_key: str | None
) -> None:
    resolver = resolver_of(FakeFetcher(), registered("a", "org/a"))

    async def status(edge: Edge, **headers: str) -> int:
        url = edge.url + path
        async with edge.client.request(method, url, json={}, headers=headers) as answer:
            return answer.status

    async with serving(adapters=resolver, admin_key="boss", api_key=api_key) as edge:
        assert await status(edge) == 401
        assert await status(edge, authorization="Bearer key") == 401
        assert await status(edge, **BOSS) in {200, 400}
        assert await status(edge, **{"x-api-key": "boss"}) in {200, 400}
        # And the admin key opens nothing else.
        generated = await edge.post("/generate", {"inputs": "hello"}, headers=BOSS)
        assert generated[0] == (200 if api_key is None else 401)
    async with serving(adapters=resolver, api_key=api_key) as edge:
        assert await status(edge, authorization="Bearer key") == 404
        assert await status(edge, **BOSS) == 404


async def test_a_server_without_adapters_names_the_flag_that_enables_them() -> None:
    async with serving(admin_key="boss") as edge:
        status, body = await post(edge, LOAD, lora_name="a", lora_path="org/a")
        assert (status, "--enable-lora" in body["error"]["message"]) == (400, True)
        assert await listed(edge) == []
