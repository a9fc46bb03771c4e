"""Named API keys: who is let in, what is logged, whose tokens are shared, and a file that changes."""

from __future__ import annotations

import io
from hmac import compare_digest
from pathlib import Path

import orjson
import pytest

from millrace_router.access.keys import ApiKeys
from millrace_testing.router.edge import logging_to, serving

ASKED = {"inputs": "a", "parameters": {"max_new_tokens": 2}}
KEYS = "search:key-1\nsearch:key-2\nops:key-3"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text(KEYS)
    return path


async def test_each_key_opens_every_route_that_needs_one(file: Path) -> None:
    async with serving(api_key_file=file) as edge:
        for headers in (bearer("key-1"), bearer("key-2"), {"x-api-key": "key-3"}):
            assert (await edge.post("/generate", ASKED, headers=headers))[0] == 200
            assert (await edge.get("/v1/quarantine", headers=headers))[0] == 200
        for headers in (
            {},
            bearer("key"),
            bearer("key-4"),
            bearer("search"),
            bearer("search:key-1"),
        ):
            status, body, _ = await edge.post("/generate", ASKED, headers=headers)
            assert (status, body) == (401, "")
            status, body, _ = await edge.post("/v1/messages", {}, headers=headers)
            assert (status, body["error"]["type"]) == (401, "authentication_error")
        assert (await edge.get("/health"))[0] == 200


async def test_the_unnamed_key_works_with_the_named_ones(file: Path) -> None:
    async with serving(api_key="key-0", api_key_file=file) as edge:
        for key, status in (("key-0", 200), ("key-3", 200), ("key-4", 401)):
            assert (await edge.post("/generate", ASKED, headers=bearer(key)))[0] == status


async def test_names_are_logged_and_keys_are_not(file: Path) -> None:
    output = io.BytesIO()
    with logging_to(output):
        async with serving(api_key="key-0", api_key_file=file, fairness="tenant") as edge:
            for key in ("key-2", "key-3", "key-0", "key-4"):
                headers = bearer(key) | {"x-tenant": "made-up"}
                await edge.post("/generate", ASKED, headers=headers)
            tenants = [request.scheduling.tenant for request in edge.batcher.requests]
    lines = [orjson.loads(line)["fields"] for line in output.getvalue().splitlines()]
    told = [(line.get("key_name"), line.get("tenant")) for line in lines]
    assert told == [("search", "search"), ("ops", "ops"), (None, "made-up"), (None, None)]
    assert tenants == ["search", "ops", "made-up"]
    assert b"key-" not in output.getvalue()


async def test_every_key_is_compared_whole(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def watching(given: bytes, expected: bytes) -> bool:
        compared.append((given, expected))
        return compare_digest(given, expected)

    keys = ApiKeys("key-0", file)
    monkeypatch.setattr("millrace_router.access.keys.compare_digest", watching)
    for given in ("key-0", "key-1", "key-3", "", "k"):
        compared.clear()
        keys.name_of(bearer(given))
        assert compared == [
            pair
            for key in ("key-0", "key-1", "key-2", "key-3")
            for pair in (
                (f"Bearer {given}".encode(), f"Bearer {key}".encode()),
                (b"", key.encode()),
            )
        ]


async def test_a_changed_file_is_read_and_a_bad_one_is_not(file: Path) -> None:
    def status(keys: ApiKeys) -> list[str | None]:
        return [keys.name_of(bearer(key)) for key in ("key-0", "key-1", "key-3", "key-4")]

    keys = ApiKeys("key-0", file)
    assert status(keys) == ["", "search", "ops", None]
    file.write_text("ops:key-4")
    keys.reload()
    assert status(keys) == ["", None, None, "ops"]
    for bad in ("", "ops", "ops:key-3\nme:key-3"):
        file.write_text(bad)
        output = io.BytesIO()
        with logging_to(output):
            keys.reload()
        (line,) = map(orjson.loads, output.getvalue().splitlines())
        assert line["level"] == "ERROR"
        assert line["fields"]["message"] == "the API keys stay as they were"
        assert b"key-3" not in output.getvalue()
        assert status(keys) == ["", None, None, "ops"]


async def test_names_of_adapters_are_for_named_keys_too(file: Path) -> None:
    keys = ApiKeys(None, file)
    assert keys.admit(bearer("key-1"))
    assert not keys.admit({})
    assert ApiKeys(None).admit({})
    assert not ApiKeys("key-0").can_change
