"""Runs `millrace` as a process against servers of the test's own process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from aiohttp import web

PATHS = os.pathsep.join(path for path in sys.path if path)


async def started(
    *words: str, stdin: int = asyncio.subprocess.PIPE, **variables: str
) -> asyncio.subprocess.Process:
    """The process of `millrace` with pipes, or with another stdin."""
    hidden = ("API_KEY",)
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "millrace", *words),
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment | {"PYTHONPATH": PATHS} | variables,
    )


async def run(*words: str, text: str = "", **variables: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    process = await started(*words, stdin=asyncio.subprocess.PIPE, **variables)
    out, err = await process.communicate(text.encode())
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


class OpenAI:
    """A server of OpenAI's chats that answers what `answer` makes of a body, a word an event."""

    def __init__(self, answer: Callable[[dict[str, Any]], str]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self._answer = answer

    def application(self) -> web.Application:
        """Its routes."""
        application = web.Application()
        application.router.add_get("/v1/models", self._models)
        application.router.add_post("/v1/chat/completions", self._chat)
        return application

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "the-model"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        text = self._answer(body)
        if text == "refuse":
            error = {"message": "no such thing", "type": "invalid_request_error"}
            return web.json_response({"error": error}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        words = text.split(" ")
        for number, word in enumerate(words):
            piece = word if number == 0 else f" {word}"
            await _send(response, {"choices": [{"index": 0, "delta": {"content": piece}}]})
            await self.go_on.wait()
        end = {"index": 0, "delta": {}, "finish_reason": "stop"}
        await _send(response, {"choices": [end]})
        usage = {"prompt_tokens": 7, "completion_tokens": len(words) * 2}
        await _send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\r\n\r\n")
