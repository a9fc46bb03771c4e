"""Hostile and unlucky clients: connections, heads and bodies are bounded, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from millrace_router.api.body.fields import MAX_MESSAGES, MAX_TOOLS
from millrace_router.api.body.reading import MOST_NAMED
from millrace_router.api.chat.start import run_chat
from millrace_router.api.openai.request import ChatCompletionRequest
from millrace_router.engine.infer import MAX_ASIDE, MAX_LINE_ASIDE, RESERVE
from millrace_router.errors import Overloaded
from millrace_router.server import bodies
from millrace_router.server.connections import CONNECTIONS, MAX_FIELD_BYTES, Connections
from millrace_router.server.sse import PIECE_BYTES
from millrace_testing.router.edge import Edge, echo, limits_with, play, serving
from millrace_testing.router.idempotent import until

ASKED = {"inputs": "a", "parameters": {"max_new_tokens": 2}}
SECONDS = 30.0


def bounds(edge: Edge) -> Connections:
    return edge.runner.app[CONNECTIONS]


def num_closed(edge: Edge, bound: str) -> float:
    return edge.services.metrics.connections_closed.labels(bound=bound).value


@asynccontextmanager
async def connected(
    edge: Edge, sent: bytes = b""
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect, and send these bytes."""
    host, _, port = edge.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer_on(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Read an answer; its status, and its body as JSON where it is."""
    async with asyncio.timeout(SECONDS):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next(line for line in head.splitlines() if line.startswith("content-length:"))
        body = await reader.readexactly(int(length.partition(":")[2]))
    return int(head.split()[1]), json.loads(body) if "application/json" in head else body.decode()


async def is_cut(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(SECONDS):
        try:
            return await reader.read() == b""
        except ConnectionResetError:
            return True


def head(path: str, length: int = 1000) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n\r\n"
    ).encode()


async def test_at_the_limit_the_oldest_idle_connection_goes_with_one_line_in_the_log() -> None:
    async with serving() as edge:
        bounds(edge).max_open = 3
        async with connected(edge) as (oldest, _):
            await until(lambda: bounds(edge).num_open == 1)
            async with connected(edge), connected(edge):
                await until(lambda: bounds(edge).num_open == 3)
                assert (await edge.get("/livez"))[0] == 200
                assert await is_cut(oldest)
                assert num_closed(edge, "connections") == 1
            with capture_logs() as lines:
                async with connected(edge), connected(edge), connected(edge), connected(edge):
                    await until(lambda: num_closed(edge, "connections") >= 3)
            assert not [line for line in lines if line.get("bound") == "connections"]


async def test_a_connection_that_waits_for_its_answer_does_not_go() -> None:
    async with serving(None) as edge:
        bounds(edge).max_open = 1
        asking = asyncio.create_task(edge.post("/generate", ASKED))
        await edge.batcher.arrived.wait()
        async with connected(edge) as (reader, _):
            assert await is_cut(reader)
        play(edge.batcher.streams[0], "x")
        assert (await asking)[0] == 200


async def test_unfinished_headers_are_given_a_time() -> None:
    async with serving() as edge:
        bounds(edge).head_seconds = 0.0
        async with connected(edge, b"GET /livez HTTP/1.1\r\nx: ") as (reader, _):
            assert await is_cut(reader)
        assert num_closed(edge, "time") == 1
        assert (await edge.get("/livez"))[0] == 200


@pytest.mark.parametrize(
    ("path", "message_of"),
    [
        ("/generate", lambda body: body["error"]),
        ("/v1/chat/completions", lambda body: body["error"]["message"]),
        ("/v1/messages", lambda body: body["error"]["message"]),
    ],
)
@pytest.mark.parametrize("shape", ["one", "many"])
async def test_long_headers_get_431_in_the_form_of_their_route(
    path: str, message_of: Callable[[Any], str], shape: str
) -> None:
    long = b"x: " + b"y" * (MAX_FIELD_BYTES + 1000 if shape == "one" else 50_000) + b"\r\n"
    sent = f"POST {path} HTTP/1.1\r\nhost: x\r\n".encode() + long * (1 if shape == "one" else 4)
    async with serving(template="a") as edge:
        async with connected(edge, sent) as (reader, _):
            status, body = await answer_on(reader)
        assert (status, "each may have 65536 bytes" in message_of(body)) == (431, True)
        assert bounds(edge).num_bytes == 0


async def test_a_header_of_64_kb_is_taken() -> None:
    async with serving() as edge:
        status, _, response = await edge.post("/generate", ASKED, headers={"x-long": "y" * 65_536})
        assert status == 200
        assert response.headers["connection"] == "close"
        await until(lambda: bounds(edge).num_open == 0)


async def test_what_is_not_http_gets_a_described_400() -> None:
    async with serving() as edge, connected(edge, b"GET / HTTP/9.9.9\r\n\r\n") as (reader, _):
        status, body = await answer_on(reader)
    assert (status, body["error_type"]) == (400, "validation")


async def test_unfinished_bodies_share_a_bounded_memory() -> None:
    """The oldest bodies go first, with an answer, and what was received of them is forgotten."""
    async with serving() as edge:
        hub = bounds(edge)
        hub.max_bytes = 4000
        async with (
            connected(edge, head("/generate") + b" " * 900) as (first, _),
            connected(edge, head("/v1/completions") + b" " * 900) as (second, _),
        ):
            await until(lambda: hub.num_bytes == 1800)
            async with (
                connected(edge, head("/generate") + b" " * 900),
                connected(edge, head("/generate") + b" " * 900),
                connected(edge, head("/generate") + b" " * 900),
                connected(edge, head("/generate") + b" " * 900),
            ):
                for reader in (first, second):
                    status, body = await answer_on(reader)
                    assert (status, body["error_type"]) == (429, "overloaded")
                assert hub.num_bytes <= 4000
                assert num_closed(edge, "memory") == 2
                assert (await edge.post("/generate", ASKED))[0] == 200
        await until(lambda: hub.num_bytes == 0)


async def test_unfinished_headers_share_that_memory() -> None:
    async with serving() as edge:
        hub = bounds(edge)
        hub.max_bytes = 4000
        unfinished = b"GET / HTTP/1.1\r\nx: " + b"y" * 2000
        async with connected(edge, unfinished) as (first, _):
            await until(lambda: hub.num_bytes > 2000)
            async with connected(edge, unfinished):
                assert await is_cut(first)
            assert hub.num_bytes <= 4000


@pytest.mark.usefixtures("_without_collector")
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/nowhere"])
async def test_an_idle_connection_keeps_neither_body_nor_answer(path: str) -> None:
    """Its request, which aiohttp keeps until the next one, is empty."""
    async with serving() as edge:
        body = {"prompt" if path == "/v1/completions" else "inputs": "a", "user": "x" * 5000}
        await edge.post(path, body)
        await until(lambda: bounds(edge).num_bytes == 0)
        server = edge.runner.server
        assert server is not None
        (connection,) = server.connections
        objects = gc.get_objects()
        requests = [
            one for one in objects if isinstance(one, web.Request) and one.protocol is connection
        ]
        assert requests
        assert not any(map(len, requests))
        answers = [one for one in objects if type(one) is web.Response]
        assert [one.body for one in answers if one.body] == []


async def test_idle_connections_are_kept_for_75_seconds() -> None:
    async with serving() as edge:
        assert (await edge.post("/generate", ASKED))[0] == 200
        server = edge.runner.server
        assert server is not None
        assert [one.keepalive_timeout for one in server.connections] == [75.0]


async def test_slow_bodies_take_no_permit() -> None:
    limits = limits_with(max_concurrent_requests=1)
    async with serving(limits=limits) as edge, connected(edge, head("/generate") + b"{"):
        await until(lambda: bounds(edge).num_bytes == 1)
        assert (await edge.post("/generate", ASKED))[0] == 200


FULL = limits_with(max_concurrent_requests=1)
TURN = {"role": "user", "content": "a"}
MESSAGE = {"model": "tgi", "max_tokens": 2, "messages": [TURN]}


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/", "tgi"),
        ("/generate", "tgi"),
        ("/v1/completions", "openai"),
        ("/v1/chat/completions", "openai"),
        ("/v1/responses", "openai"),
        ("/v1/messages", "anthropic"),
        ("/v1/messages/count_tokens", "anthropic"),
        ("/chat_tokenize", "tgi"),
        ("/tokenize", "tgi"),
        ("/detokenize", "tgi"),
        ("/invocations", "tgi"),
        ("/vertex", "tgi"),
        ("/v2/models/x/infer", "tgi"),
    ],
)
async def test_a_full_server_parses_no_body(path: str, form: str) -> None:
    """Even one that is not JSON gets 429."""
    async with serving(None, limits=FULL, template="a") as edge:
        running = asyncio.create_task(edge.post("/generate", ASKED))
        await edge.batcher.arrived.wait()
        headers = {"content-type": "application/json"}
        status, body, _ = await edge.post(path, data=b"[" * 100_000, headers=headers)
        assert status == 429, (form, body)
        play(edge.batcher.streams[0], "x")
        await running


async def test_large_bodies_are_parsed_off_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []

    def noted(body: bytes) -> None:
        threads.append(threading.get_ident())

    monkeypatch.setattr(bodies, "check_structure", noted)
    async with serving() as edge:
        for size, is_on_loop in ((10, True), (100_000, False)):
            threads.clear()
            for path, name in (("/generate", "inputs"), ("/v1/completions", "prompt")):
                await edge.post(path, {name: "a", "user": "x" * size})
            assert len(threads) == 2
            assert {one == threading.get_ident() for one in threads} == {is_on_loop}


async def test_large_bodies_are_parsed_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, release = list[int](), threading.Event()

    def noted(body: bytes) -> None:
        threads.append(threading.get_ident())
        release.wait(SECONDS)

    monkeypatch.setattr(bodies, "check_structure", noted)
    async with serving() as edge, asyncio.TaskGroup() as clients:
        for _ in range(4):
            clients.create_task(edge.post("/generate", {"inputs": "a", "user": "x" * 100_000}))
        await until(lambda: bounds(edge).num_bytes >= 400_000)
        release.set()
    assert len(threads) == 4
    assert len(set(threads)) == 1


async def test_a_full_server_reads_no_schema_and_renders_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(None, limits=FULL, template="a") as edge:
        running = asyncio.create_task(edge.post("/generate", ASKED))
        await edge.batcher.arrived.wait()
        worked: list[str] = []
        for owner, name in (
            (edge.services.validator, "make_grammar"),
            (edge.services.template, "render"),
        ):
            monkeypatch.setattr(type(owner), name, lambda *_, name=name, **__: worked.append(name))
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        body = {"messages": [TURN], "tools": [tool], "tool_choice": "required"}
        chat = ChatCompletionRequest.model_validate(body).chat(edge.services.limits)
        with pytest.raises(Overloaded):
            async with run_chat(edge.services, chat, adapter=None):
                pass
        assert worked == []
        play(edge.batcher.streams[0], "x")
        await running


@pytest.mark.parametrize(
    ("path", "body", "step"),
    [
        ("/v1/chat/completions", {"messages": [TURN]}, "openai.request.check_exclusive"),
        ("/chat_tokenize", {"messages": [TURN]}, "openai.request.check_exclusive"),
        ("/v1/estimate", {"messages": [TURN]}, "openai.request.check_exclusive"),
        ("/vertex", {"instances": [{"messages": [TURN]}]}, "openai.request.check_exclusive"),
        ("/v1/completions", {"prompt": "a"}, "openai.request.prompts_of"),
        ("/v1/estimate", {"prompt": "a"}, "openai.request.prompts_of"),
        ("/v1/messages", MESSAGE, "anthropic.to_chat.check_exclusive"),
        ("/v1/messages/count_tokens", MESSAGE, "anthropic.to_chat.check_exclusive"),
        ("/v1/responses", {"input": "a"}, "responses.to_chat.check_exclusive"),
    ],
)
async def test_large_bodies_are_translated_off_the_loop(
    path: str, body: dict[str, Any], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, name = f"millrace_router.api.{step}".rpartition(".")
    translate, threads = getattr(import_module(module), name), list[int]()

    def noted(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return translate(*arguments)

    monkeypatch.setattr(f"{module}.{name}", noted)
    async with serving(template="a") as edge:
        for size, is_on_loop in ((10, True), (100_000, False)):
            threads.clear()
            status, answer, _ = await edge.post(path, {**body, "metadata": {"a": "x" * size}})
            assert status == 200, answer
            assert {one == threading.get_ident() for one in threads} == {is_on_loop}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "messages"),
        ("/chat_tokenize", "messages"),
        ("/v1/messages", "messages"),
        ("/v1/messages/count_tokens", "messages"),
        ("/v1/responses", "input"),
        ("/v1/estimate", "messages"),
        ("/invocations", "messages"),
    ],
)
async def test_conversations_have_a_bounded_number_of_turns(path: str, name: str) -> None:
    async with serving(template="a", limits=limits_with(max_input_tokens=12)) as edge:
        for count, is_taken in ((MAX_MESSAGES, True), (MAX_MESSAGES + 1, False)):
            asked = {name: [TURN] * count, "max_tokens": 2, "model": "tgi"}
            _, body, _ = await edge.post(path, asked)
            assert (f"must have at most {MAX_MESSAGES} items" in str(body)) is not is_taken


@pytest.mark.parametrize(
    ("path", "body", "tool"),
    [
        ("/v1/chat/completions", {"messages": [TURN]}, {"function": {"name": "f"}}),
        ("/v1/messages", MESSAGE, {"name": "f", "input_schema": {"type": "object"}}),
        ("/v1/responses", {"input": "a"}, {"type": "function", "name": "f"}),
    ],
)
async def test_requests_have_a_bounded_number_of_tools(
    path: str, body: dict[str, Any], tool: dict[str, Any]
) -> None:
    async with serving(template="a") as edge:
        for count, is_taken in ((MAX_TOOLS, True), (MAX_TOOLS + 1, False)):
            _, answer, _ = await edge.post(path, {**body, "tools": [tool] * count})
            assert (f"must have at most {MAX_TOOLS} items" in str(answer)) is not is_taken, answer


async def test_a_long_list_of_tokens_is_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    write = web.StreamResponse.write

    async def noted(response: web.StreamResponse, data: bytes) -> None:
        pieces.append(len(data))
        await write(response, data)

    monkeypatch.setattr(web.StreamResponse, "write", noted)
    async with serving(template="{{ messages[0].content }}") as edge:
        status, tokens, response = await edge.post("/tokenize", {"inputs": "a " * 10_000})
        assert (status, len(tokens)) == (200, 10_000)
        assert int(response.headers["content-length"]) == sum(pieces) > PIECE_BYTES
        assert max(pieces) == PIECE_BYTES
        chat = {"messages": [{"role": "user", "content": "a " * 10_000}]}
        status, answer, _ = await edge.post("/chat_tokenize", chat)
        assert (status, answer["tokenize_response"]) == (200, tokens)
        assert (await edge.post("/tokenize", {"prompt": "a b"}))[1]["count"] == 2


async def test_a_refused_field_is_noticed_behind_thousands_of_unknown_ones() -> None:
    many = {f"f{i}": 1 for i in range(50_000)}
    async with serving() as edge:
        _, _, response = await edge.post("/v1/completions", {"prompt": "a", **many})
        assert response.headers["x-millrace-ignored"].endswith(f"f19, +{MOST_NAMED - 20}")
        status, body, _ = await edge.post(
            "/v1/completions", {"prompt": "a", **many, "use_beam_search": True}
        )
        assert (status, body["error"]["param"]) == (422, "use_beam_search")


async def test_estimates_wait_in_a_bounded_line_and_take_no_permit() -> None:
    async with serving(limits=FULL) as edge, AsyncExitStack() as held:
        infer = edge.services.infer
        infer.permits.take()
        for _ in range(MAX_ASIDE):
            await held.enter_async_context(infer.turn_aside(takes_permit=False))
        asked = {"inputs": "a"}
        waiting = [
            asyncio.create_task(edge.post("/v1/estimate", asked))
            for _ in range(MAX_LINE_ASIDE - MAX_ASIDE)
        ]
        await until(lambda: infer.line_aside.free == 0)
        status, body, response = await edge.post("/v1/estimate", asked)
        assert (status, body["error_type"]) == (429, "overloaded")
        assert int(response.headers["retry-after"]) >= 1
        await held.aclose()
        assert {(await one)[0] for one in waiting} == {200}
        assert infer.line_aside.taken == 0
        infer.permits.give()


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens", "/chat_tokenize"])
async def test_few_texts_are_tokenized_at_a_time_for_their_own_sake(path: str) -> None:
    async with serving(template="a") as edge, AsyncExitStack() as held:
        infer = edge.services.infer
        for _ in range(MAX_ASIDE):
            await held.enter_async_context(infer.turn_aside(takes_permit=False))
        asked = ASKED if path == "/tokenize" else {"messages": [TURN], "model": "tgi"}
        waiting = asyncio.create_task(edge.post(path, asked))
        await until(lambda: infer.line_aside.taken == MAX_ASIDE + 1)
        assert infer.permits.taken == 0
        assert (await edge.post("/generate", ASKED))[0] == 200
        assert not waiting.done()
        await held.aclose()
        assert (await waiting)[0] == 200


async def test_a_tenant_cannot_take_the_permits_that_are_reserved_for_others() -> None:
    limits = limits_with(max_concurrent_requests=RESERVE)
    async with serving(None, limits=limits, fairness="tenant") as edge:
        mine, yours = {"x-tenant": "me"}, {"x-tenant": "you"}
        running = [
            asyncio.create_task(edge.post("/generate", ASKED, headers=mine))
            for _ in range(RESERVE - 1)
        ]
        await until(lambda: len(edge.batcher.streams) == RESERVE - 1)
        async with asyncio.timeout(SECONDS):
            status, body, _ = await edge.post("/generate", ASKED, headers=mine)
        assert (status, "of this tenant" in body["error"]) == (429, True)
        edge.batcher.script = echo
        assert (await edge.post("/generate", ASKED, headers=yours))[0] == 200
        for stream in edge.batcher.streams[: RESERVE - 1]:
            play(stream, "x")
        assert {(await one)[0] for one in running} == {200}
        assert edge.services.infer.permits.taken == 0


def test_the_limit_of_open_files_is_raised_and_bounds_connections() -> None:
    program = (
        "import resource as r; from millrace_router.process import *;"
        "r.setrlimit(r.RLIMIT_NOFILE, (300, 1024)); print(most_connections(), end=' ');"
        "raise_file_limit(); print(r.getrlimit(r.RLIMIT_NOFILE)[0], most_connections())"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert ran.stdout.split() == [b"150", b"1024", b"768"]
