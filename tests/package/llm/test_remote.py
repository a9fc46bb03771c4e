"""A server at a URL, whose every word is known."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web
from tests.package.programs import OpenAI

from millrace import LLM, AsyncLLM, ConnectionFailed, RequestError, SamplingParams
from millrace_testing.router.sse import served_application

MESSAGES = [{"role": "user", "content": "One?"}]


async def completions(request: web.Request) -> web.StreamResponse:
    """Two choices of two words; their ids are known for the first prompt."""
    body = await request.json()
    response = web.StreamResponse()
    await response.prepare(request)
    for number, word in enumerate(("re ", str(body["prompt"]))):
        for index in range(body["n"]):
            choice = {"index": index, "text": word, "token_ids": [number], "finish_reason": None}
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def test_completions() -> None:
    application = OpenAI(lambda body: "").application()
    application.router.add_post("/v1/completions", completions)
    async with served_application(application) as url, AsyncLLM(f"{url}/v1") as llm:
        first, second = await llm.generate(["a", [4, 5]], SamplingParams(n=2))
        pieces = [piece async for piece in llm.stream("b")]
    assert [each.text for each in first.outputs] == ["re a", "re a"]
    assert first.outputs[1].token_ids == (0, 1)
    assert first.outputs[0].logprobs is None
    assert (second.prompt, second.text) == ((4, 5), "re [4, 5]")
    assert [piece.text for piece in pieces] == ["re ", "b"]


async def test_a_chat_streams_and_names_the_servers_model() -> None:
    server = OpenAI(lambda body: "one two")
    async with served_application(server.application()) as url, AsyncLLM(url, api_key="k") as llm:
        stream = llm.chat_stream(MESSAGES, SamplingParams(max_tokens=3), tools=[])
        pieces = [piece async for piece in stream]
    assert "".join(piece.text for piece in pieces) == "one two"
    assert pieces[-1].finish_reason == "stop"
    body = server.bodies[0]
    assert (body["model"], body["max_tokens"], body["tools"]) == ("the-model", 3, [])
    assert server.keys == ["Bearer k"]


async def test_errors_are_typed() -> None:
    server = OpenAI(lambda body: "refuse")
    async with served_application(server.application()) as url, AsyncLLM(url) as llm:
        with pytest.raises(RequestError, match="no such thing"):
            await llm.chats([MESSAGES, MESSAGES])
    with pytest.raises(ConnectionFailed):
        await AsyncLLM("http://127.0.0.1:9").start()
    with pytest.raises(RuntimeError, match="not loaded"):
        await llm.chat(MESSAGES)


def test_a_server_takes_no_flags() -> None:
    with pytest.raises(TypeError, match="max_total_tokens"):
        AsyncLLM("http://127.0.0.1:9", max_total_tokens=5)


async def test_without_an_event_loop() -> None:
    server = OpenAI(lambda body: "one two")

    def use(url: str) -> list[str]:
        with LLM(url) as llm:
            texts = [piece.text for piece in llm.chat_stream(MESSAGES)]
            stream = llm.chat_stream(MESSAGES)
            next(stream)
            stream.close()
        llm.close()
        with pytest.raises(RuntimeError, match="closed"):
            llm.chat(MESSAGES)
        return texts

    async with served_application(server.application()) as url:
        assert await asyncio.to_thread(use, url) == ["one", " two", ""]
    with pytest.raises(ConnectionFailed):
        await asyncio.to_thread(use, "http://127.0.0.1:9")
