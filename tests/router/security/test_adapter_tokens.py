"""A client's token for the hub reaches the fetcher alone: no log, error, page, metric, or request of the batcher."""

from __future__ import annotations

import io
from typing import Any

import pytest

from millrace_router.adapters.resolver import ClientRules
from millrace_router.errors import AdapterInvalid, AdapterUnavailable, RouterError
from millrace_router.request.adapter import AdapterReference, MergeRecipe
from millrace_testing.adapters.fake_fetcher import FakeFetcher, Repository, resolver_of
from millrace_testing.router.edge import logging_to, serving

TOKEN = "hf_token-5e8b"
WRONG = "hf_wrong-77c1"
ADMIN = "admin-90ab"
SECRETS = (TOKEN, WRONG, ADMIN)
TEMPLATE = "{{ messages[0].content }}"
NAME = "org/private"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
PAGES = ("/v1/models", "/info", "/metrics", "/adapters", "/v1/quarantine")


def bodies(token: str) -> list[tuple[str, dict[str, Any]]]:
    """Requests with the token in the body, right and wrong ones."""
    own = {"adapter_id": NAME, "api_token": token, "max_new_tokens": 2}
    merged = {"merged_adapters": {"ids": [NAME, "none"]}, "api_token": token}
    return [
        ("/generate", {"inputs": "hello", "parameters": own}),
        ("/generate_stream", {"inputs": "hello", "parameters": own}),
        ("/generate", {"inputs": "hello", "parameters": merged}),
        ("/generate", {"inputs": "hello", "parameters": own | {"top_p": 9}}),
        ("/generate", {"inputs": "hello", "parameters": own | {"adapter_id": 5}}),
        ("/generate", {"inputs": "hello", "parameters": own | {"api_token": [token]}}),
        ("/generate", {"inputs": "hello", "parameters": own | {"api_token": f"{token}\n"}}),
        ("/v1/estimate", {"inputs": "hello", "parameters": own}),
        ("/v1/chat/completions", CHAT | {"model": NAME, "api_token": token}),
        ("/v1/completions", {"prompt": "a", "model": NAME, "api_token": token, "max_tokens": 1}),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "org/none", "token": token}),
    ]


@pytest.mark.parametrize("json_output", [True, False])
@pytest.mark.parametrize(
    "error", [None, AdapterInvalid(NAME, "NaN"), AdapterUnavailable(NAME, "down")]
)
async def test_a_token_goes_nowhere(error: RouterError | None, *, json_output: bool) -> None:
    fetcher = FakeFetcher(hub={NAME: Repository(tokens=frozenset({TOKEN}))}, error=error)
    resolver = resolver_of(fetcher, rules=ClientRules(patterns=("hub:org/*",)))
    output, seen = io.BytesIO(), []
    with logging_to(output, json_output=json_output):
        async with serving(adapters=resolver, template=TEMPLATE, admin_key=ADMIN) as edge:
            for token in (TOKEN, WRONG):
                for path, body in bodies(token):
                    headers = {"x-adapter-token": token, "authorization": f"Bearer {ADMIN}"}
                    _, answer, response = await edge.post(path, body, headers=headers)
                    seen.append(f"{answer} {response.headers}")
            for page in PAGES:
                shown = {"x-adapter-token": TOKEN, "authorization": f"Bearer {ADMIN}"}
                _, content, response = await edge.get(page, headers=shown)
                seen.append(f"{content!r} {response.headers}")
            # All that the batcher, the journal and the shards ever know of a request.
            seen.extend(map(repr, [*edge.batcher.requests, *edge.batcher.estimated]))
            assert bool(edge.batcher.requests) == (error is None)
    seen.append(output.getvalue().decode())
    assert NAME in seen[-1] or error is not None
    assert fetcher.asked
    for secret in SECRETS:
        assert [text for text in seen if secret in text] == []


def test_a_token_is_not_shown_by_what_holds_it() -> None:
    recipe = MergeRecipe(ids=("a",), weights=(1.0,))
    for reference in (
        AdapterReference(name="a", token=TOKEN),
        AdapterReference(merged=recipe, token=TOKEN),
    ):
        assert TOKEN not in repr(reference)


async def test_what_is_remembered_has_no_token() -> None:
    fetcher = FakeFetcher(hub={NAME: Repository(tokens=frozenset({TOKEN}))})
    resolver = resolver_of(fetcher, rules=ClientRules(patterns=("hub:org/*",)))
    await resolver.resolve(AdapterReference(name=NAME, token=TOKEN), "me")
    kept = [
        resolver._access.__dict__,
        resolver._refusals.__dict__,
        resolver._clients.__dict__,
    ]
    grants = [resolver._access._grants._values, resolver._clients._values]
    assert TOKEN not in f"{kept} {grants}"
    assert grants[0]
