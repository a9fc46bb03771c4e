"""Answers of the chat page: asked for, made up, and paced."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from threading import Thread
from typing import Any

from browsing import CHAT_ROUTE, PHONE
from playwright.sync_api import Page, Route

QUESTION = "What is prefill?"
ANSWER = (
    "Prefill is the first phase of a request: the model reads all prompt tokens at once, "
    "fills the KV cache and produces the first new token."
)
LENGTH = 1000
NARROW = PHONE | {"viewport": {"width": 360, "height": 740}}


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def greedily(page: Page) -> None:
    page.fill("#temperature", "0")


def events(*chunks: dict[str, Any], done: bool = True) -> str:
    """A stream of these chunks."""
    data = [json.dumps(chunk) for chunk in chunks] + (["[DONE]"] if done else [])
    return "".join(f"data: {one}\n\n" for one in data)


def says(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


def thinks(text: str) -> dict[str, Any]:
    delta = {"reasoning_content": text, "reasoning": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def answer_with(page: Page, body: str, *, status: int = 200, **headers: str) -> None:
    """Answer chats with this instead of what the server says."""
    kind = "text/event-stream" if status == 200 else "application/json"

    def answer(route: Route) -> None:
        route.fulfill(status=status, headers={"content-type": kind, **headers}, body=body)

    page.route(CHAT_ROUTE, answer)


def refuse_with(page: Page, message: str, *, status: int, type_: str, **headers: str) -> None:
    error = {"message": message, "type": type_, "http_status_code": status}
    body = json.dumps({"error": error, "error_type": type_})
    answer_with(page, body, status=status, **headers)


def asked_of(page: Page, act: Callable[[], object]) -> dict[str, Any]:
    """The body of the chat that `act` asks for."""
    with page.expect_request(CHAT_ROUTE) as asked:
        act()
    body: dict[str, Any] = asked.value.post_data_json
    return body


def at_length(route: Route) -> None:
    """Let the model go on for seconds, whatever it says."""
    body = route.request.post_data_json | {"ignore_eos": True, "max_tokens": LENGTH}
    route.continue_(post_data=json.dumps(body))


class Paced(ThreadingHTTPServer):
    """Streams the pieces of an answer, each when it is asked for."""

    def __init__(self) -> None:
        pieces = self.pieces = SimpleQueue[str]()

        class Chat(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                while piece := pieces.get(timeout=60):
                    self.wfile.write(piece.encode())

            def log_message(self, *_: object) -> None:
                """The output is for what passed and what failed."""

        super().__init__(("127.0.0.1", 0), Chat)


@contextmanager
def paced(page: Page) -> Iterator[SimpleQueue[str]]:
    """Answer chats with the pieces put into this queue, until an empty one."""
    with Paced() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
        page.route(CHAT_ROUTE, lambda route: route.continue_(url=address))
        try:
            yield server.pieces
        finally:
            server.pieces.put("")
            server.shutdown()
