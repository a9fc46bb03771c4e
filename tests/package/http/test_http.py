"""The HTTP client's answers and errors, and its reader of streams."""

from __future__ import annotations

import pytest
from aiohttp import web
from tests.package.programs import OpenAI

from millrace.errors import ConnectionFailed, RequestError
from millrace.http.client import Client, base_of, refusal
from millrace.http.sse import EventReader
from millrace_testing.router.sse import served_application


def test_the_base_of_openai_clients_is_the_same_server() -> None:
    assert base_of("http://a/v1/") == base_of("http://a/v1") == base_of("http://a/") == "http://a"
    assert base_of("http://a/prefix/v1") == "http://a/prefix"


async def test_events_come_whole() -> None:
    server = OpenAI(lambda body: "one two")
    async with served_application(server.application()) as url, Client(url) as client:
        events = [event async for event in client.stream("/v1/chat/completions", {"messages": []})]
    texts = [choice["delta"].get("content") for e in events for choice in e["choices"]]
    assert texts == ["one", " two", None]


async def test_a_refusal_and_an_error_event_are_typed() -> None:
    async def fail(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"error": "too long", "error_type": "validation"}\n\n')
        return response

    application = OpenAI(lambda body: "refuse").application()
    application.router.add_post("/fail", fail)
    async with served_application(application) as url, Client(url) as client:
        with pytest.raises(RequestError, match="no such thing") as refused:
            await client.post("/v1/chat/completions", {})
        with pytest.raises(RequestError, match="too long") as failed:
            [event async for event in client.stream("/fail", {})]
    assert (refused.value.status, refused.value.kind) == (400, "invalid_request_error")
    assert failed.value.kind == "validation"


@pytest.mark.parametrize("models", ["[]", '{"data": 5}', '{"data": ["m"]}', "null"])
async def test_answers_of_other_servers_are_typed_errors(models: str) -> None:
    async def events(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: [1]\n\n")
        return response

    async def listed(_: web.Request) -> web.Response:
        return web.Response(text=models, content_type="application/json")

    application = web.Application()
    application.router.add_post("/events", events)
    application.router.add_get("/v1/models", listed)
    async with served_application(application) as url, Client(url) as client:
        with pytest.raises(RequestError, match="no list of models"):
            await client.first_model()
        with pytest.raises(RequestError, match="an event is not an object"):
            [event async for event in client.stream("/events", {})]


async def test_no_server_is_a_connection_that_failed() -> None:
    async with Client("http://127.0.0.1:9") as client:
        sentence = (
            "^no server at http://127.0.0.1:9: nothing listens there; `millrace serve` starts one$"
        )
        with pytest.raises(ConnectionFailed, match=sentence):
            await client.get("/info")
        with pytest.raises(ConnectionFailed, match=sentence):
            [event async for event in client.stream("/x", {})]


@pytest.mark.parametrize(
    ("scheme", "host", "sentence"),
    [
        ("https", None, "does not speak HTTPS: try an address that begins with http://"),
        ("http", "no-such-host.invalid", "the name no-such-host.invalid cannot be resolved"),
    ],
)
async def test_a_server_that_cannot_be_reached_is_a_plain_sentence(
    scheme: str, host: str | None, sentence: str
) -> None:
    async with served_application(web.Application()) as url:
        address = f"{scheme}://{host or url.partition('://')[2]}"
        async with Client(address) as client:
            with pytest.raises(ConnectionFailed, match=sentence):
                await client.get("/info")


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b'{"error": {"message": "m", "type": "t"}}', "t", "m"),
        (b'{"error": "m", "error_type": "t"}', "t", "m"),
        (b'{"message": "m", "code": "t"}', "t", "m"),
        (b"<html>", "error", "status 502: <html>"),
        (b"[]", "error", "status 502: []"),
    ],
)
def test_refusals_of_all_servers_have_a_kind_and_a_message(
    body: bytes, kind: str, message: str
) -> None:
    error = refusal(502, body)
    assert (error.status, error.kind, str(error)) == (502, kind, message)


STREAM = b': hello\n\nevent: a\ndata: {"x":\ndata: 1}\n\ndata:two\r\n\r\nid: 3\n\ndata: [DONE]\n\n'
EVENTS = [b'{"x":\n1}', b"two"]


@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
def test_any_cut_gives_the_same_events(size: int) -> None:
    reader = EventReader()
    chunks = [STREAM[place : place + size] for place in range(0, len(STREAM), size)]
    assert [data for chunk in chunks for data in reader.feed(chunk)] == EVENTS
    assert reader.rest == b""


def test_a_cut_stream_has_a_rest() -> None:
    reader = EventReader()
    assert list(reader.feed(STREAM[:30])) == []
    assert reader.rest != b""
