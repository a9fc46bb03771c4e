"""Keys, prompts and answers never appear in logs, errors, metrics and public pages."""

from __future__ import annotations

import asyncio
import io
import json
from hmac import compare_digest
from typing import Any

import pytest

from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_testing.router.edge import echo, fail, logging_to, play, serving

API_KEY = "key-4f1d"
WRONG_KEY = "wrong-9c2e"
PROMPT = "prompt-77aa"
ANSWER = "answer-51bd"
HEADER = "header-c3d9"
SECRETS = (API_KEY, WRONG_KEY, PROMPT, ANSWER, HEADER)
PUBLIC = (
    "/",
    "/health",
    "/metrics",
    "/status",
    "/info",
    "/v1/models",
    "/docs",
    "/api-doc/openapi.json",
)

TEMPLATE = "{% if messages[0].content == 'fail' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"

P: dict[str, Any] = {"max_new_tokens": 2}
MESSAGES = [{"role": "user", "content": PROMPT}]
BODIES: list[tuple[str, Any]] = [
    ("/generate", {"inputs": PROMPT, "parameters": P}),
    ("/generate_stream", {"inputs": PROMPT, "parameters": P}),
    ("/", {"inputs": PROMPT, "parameters": P | {"return_full_text": True}}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
    ("/v1/responses", {"input": PROMPT, "instructions": PROMPT, "max_output_tokens": 2}),
    ("/v1/responses", {"input": [{"type": PROMPT}], "user": PROMPT}),
    ("/v1/estimate", {"inputs": PROMPT, "parameters": P}),
    ("/tokenize", {"inputs": PROMPT}),
    ("/chat_tokenize", {"messages": MESSAGES}),
    ("/generate", {"inputs": [PROMPT]}),
    ("/generate", {"inputs": PROMPT, "parameters": {"stop": [PROMPT] * 9}}),
    ("/generate", {"inputs": PROMPT, "parameters": {"temperature": PROMPT}}),
    ("/generate", {"inputs": PROMPT, "parameters": {PROMPT: 1, "top_p": 9}}),
    ("/generate", {"inputs": " ".join([PROMPT] * 99), "parameters": P}),
    ("/v1/chat/completions", {"messages": [{"role": PROMPT, "content": [{"type": "text"}]}]}),
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": [{PROMPT: 1}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "fail", "name": PROMPT}]}),
    ("/nowhere", {"inputs": PROMPT}),
]


def answer(request: ValidRequest, stream: TokenStream) -> None:
    """Every word of the answer is a secret too."""
    play(stream, ANSWER, ANSWER)


def crash(request: ValidRequest, stream: TokenStream) -> None:
    """A bug whose message says nothing, with secrets in its variables."""
    prompt = PROMPT
    raise AssertionError(len(prompt))


HEADERS = {
    "idempotency-key": HEADER,
    "last-event-id": HEADER,
    "x-tenant": HEADER,
    "cookie": HEADER,
    "x-priority": HEADER,
}


@pytest.mark.parametrize("json_output", [True, False])
@pytest.mark.parametrize("script", [answer, echo, fail, crash])
async def test_nothing_of_a_request_is_logged_or_public(script: Any, json_output: bool) -> None:
    output = io.BytesIO()
    seen = bytearray()
    with logging_to(output, level="trace", json_output=json_output):
        async with serving(script, api_key=API_KEY, template=TEMPLATE, fairness="tenant") as edge:
            for path, body in BODIES:
                for key in (API_KEY, WRONG_KEY):
                    for more in ({}, HEADERS):
                        sent = {"authorization": f"Bearer {key}", **more}
                        where = f"{path}?api_key={key}&q={PROMPT}"
                        _, told, response = await edge.post(where, body, headers=sent)
                        assert key not in f"{told}{response.headers}"
                raw = json.dumps(body).encode()[:-3] + b'"' + PROMPT.encode()
                sent = {"authorization": f"Bearer {API_KEY}", "content-type": "application/json"}
                async with edge.client.post(edge.url + path, data=raw, headers=sent) as response:
                    seen += await response.read()
            for path in PUBLIC:
                seen += (await edge.get(path))[1]
            await no_http(edge.url)
    logged = output.getvalue().decode()
    assert logged.count("request") >= len(BODIES)
    for secret in SECRETS:
        assert secret not in logged
        assert secret.encode() not in seen


async def no_http(url: str) -> None:
    """Bytes that are not a request, with secrets in them."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"GET /{PROMPT} HTTP/1.1\r\nauthorization: {API_KEY}\r\nb\0d {HEADER}\r\n\r\n".encode()
    )
    await reader.readline()
    writer.close()


@pytest.mark.parametrize(
    "key", ["", "Bearer", "Bearer ", f"Bearer {API_KEY[:-1]}", f"Bearer {API_KEY} ", API_KEY]
)
async def test_a_wrong_key_learns_nothing(key: str) -> None:
    async with serving(api_key=API_KEY) as edge:
        headers = {"authorization": key}
        status, body, response = await edge.post(
            "/generate", {"inputs": PROMPT, "parameters": P}, headers=headers
        )
        assert (status, body) == ((401, "") if key != f"Bearer {API_KEY} " else (200, body))
        assert edge.batcher.requests == [] or status == 200
        assert API_KEY not in str(response.headers)


async def test_the_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the standard library's function, over both headers whole: nothing stops at the first difference."""
    compared: list[tuple[bytes, bytes]] = []

    def watching(given: bytes, expected: bytes) -> bool:
        compared.append((given, expected))
        return compare_digest(given, expected)

    monkeypatch.setattr("millrace_router.access.keys.compare_digest", watching)
    async with serving(api_key=API_KEY) as edge:
        keys = ("", "B", f"Bearer {API_KEY}", "x" * 4000)
        for key in keys:
            await edge.get("/tokenize", headers={"authorization": key})
            await edge.post("/tokenize", {"inputs": "a"}, headers={"authorization": key})
    bearer, bare = f"Bearer {API_KEY}".encode(), API_KEY.encode()
    assert compared == [pair for key in keys for pair in ((key.encode(), bearer), (b"", bare))]
