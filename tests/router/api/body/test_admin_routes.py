"""Loading, unloading and listing adapters: vLLM's texts, SGLang's object, and the admin key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from millrace_router.errors import AdapterInvalid, AdapterUnavailable
from millrace_testing.adapters.fake_fetcher import (
    FakeFetcher,
    Repository,
    registered,
    resolver_of,
    version,
    write_adapter,
)
from millrace_testing.router.edge import Edge, serving

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
    ("path", "body", "status", "kind", "message"),
    [
        (LOAD, {}, 400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided."),
        (
            LOAD,
            {"lora_name": "a", "lora_path": ""},
            400,
            "InvalidUserInput",
            "Both 'lora_name' and 'lora_path' must be provided.",
        ),
        (
            LOAD,
            {"lora_name": "a", "lora_path": "org/none"},
            404,
            "NotFoundError",
            "The adapter 'a' does not exist",
        ),
        (
            LOAD,
            {"lora_name": "a", "lora_path": "neither"},
            400,
            "InvalidUserInput",
            "'neither' is neither a folder nor an id on the hub",
        ),
        (
            LOAD,
            {"lora_name": "a\n", "lora_path": "org/a"},
            400,
            "InvalidUserInput",
            "Input validation error: the name of an adapter must not have control characters",
        ),
        (
            LOAD,
            {"lora_name": "org/tiny", "lora_path": "org/a"},
            400,
            "InvalidUserInput",
            "'org/tiny' is the name of the base model.",
        ),
        (
            UNLOAD,
            {"lora_int_id": 1},
            400,
            "InvalidUserInput",
            "'lora_name' needs to be provided to unload a LoRA adapter.",
        ),
        (
            UNLOAD,
            {"lora_name": "x"},
            404,
            "NotFoundError",
            "The lora adapter 'x' cannot be found.",
        ),
    ],
)
async def test_wrong_calls_are_refused(
    path: str, body: dict[str, Any], status: int, kind: str, message: str
) -> None:
    async with serving(adapters=resolver_of(FakeFetcher()), admin_key="boss") as edge:
        got, answer = await post(edge, path, **body)
        assert (got, answer["error"]["type"]) == (status, kind)
        assert answer["error"]["message"] == message


async def test_what_cannot_be_fetched_leaves_the_former_adapter() -> None:
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


async def test_a_reload_fetches_what_failed_a_moment_ago() -> None:
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
async def test_only_the_admin_key_opens_them(method: str, path: str, api_key: str | None) -> None:
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


async def test_a_server_without_adapters_says_so() -> None:
    async with serving(admin_key="boss") as edge:
        status, body = await post(edge, LOAD, lora_name="a", lora_path="org/a")
        assert (status, "--enable-lora" in body["error"]["message"]) == (400, True)
        assert await listed(edge) == []
