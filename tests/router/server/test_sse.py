"""Streams: errors after the status, clients that stop reading, and frames that arrive once and in order."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from millrace_router.api.tgi import routes
from millrace_router.errors import QueueExpired
from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import TokenEvent, TokenStream
from millrace_router.server import sse
from millrace_router.server.stream_writer import MAX_BUFFERED_BYTES, MAX_UNREAD_BYTES, StreamWriter
from millrace_testing.router.edge import (
    Edge,
    finished,
    limits_with,
    logging_to,
    serving,
    token_event,
)
from millrace_testing.router.fake_router import new_batcher, panic
from millrace_testing.router.sse import FakeTransport, unchunked
from millrace_testing.shards.hash_shard import HashShard
from millrace_testing.shards.held_shards import HeldShards

ASKED = {"inputs": "a", "parameters": {"max_new_tokens": 2}}
CHAT = {"messages": [{"role": "user", "content": "a"}], "stream": True}


def cut_short(_: ValidRequest, stream: TokenStream) -> None:
    """Send a token and then no end."""
    stream.token(token_event(1, "x"))
    stream.finished_at = 1.0


async def test_a_stream_cut_short_ends_with_openais_error() -> None:
    async with serving(cut_short, template="a") as edge:
        _, text, _ = await edge.post("/v1/chat/completions", CHAT)
    *_, error, done, rest = text.split("\n\n")
    assert json.loads(error[6:])["error"]["type"] == "incomplete_generation_stream"
    assert (done, rest) == ("data: [DONE]", "")


@pytest.mark.parametrize("events_before", [0, 1])
@pytest.mark.parametrize("keep_alive_seconds", [0.01, 60.0])
async def test_a_defect_is_one_answer(
    monkeypatch: pytest.MonkeyPatch, events_before: int, keep_alive_seconds: float
) -> None:
    def script(_: ValidRequest, stream: TokenStream) -> None:
        for index in range(1, events_before + 1):
            stream.token(token_event(index, "x"))
        if keep_alive_seconds > 1:
            stream.token(token_event(events_before + 1, "odd"))

    monkeypatch.setattr(routes, "plain_frame", defective)
    error = b'{"error":"Internal server error","error_type":"internal"}'
    async with serving(script, keep_alive_seconds=keep_alive_seconds) as edge:
        async with edge.client.post(f"{edge.url}/generate_stream", json=ASKED) as response:
            started = events_before or keep_alive_seconds < 1
            assert response.status == (200 if started else 500)
            if keep_alive_seconds < 1:
                edge.batcher.streams[0].token(token_event(events_before + 1, "odd"))
            text = await response.content.read()
        await edge.services.infer.permits.all_free()
        failures = [line for line in (await edge.exposition()) if "request_failure{" in line]
    assert failures == ['tgi_request_failure{err="internal"} 1']
    events = text.replace(b":\n\n", b"")
    assert events == (
        b"data: {}\n\n" * events_before + b"data: %b\n\n" % error if started else error
    )


MESSAGES = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", ASKED),
        ("/generate_stream", ASKED),
        ("/v1/chat/completions", MESSAGES),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 2}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 16}),
        ("/v1/messages", MESSAGES),
    ],
)
async def test_a_panic_of_a_library_is_a_defect_with_a_status(
    path: str, body: dict[str, Any]
) -> None:
    """The exceptions of libraries in Rust are no `Exception`, and would close the connection."""

    def script(_: ValidRequest, __: TokenStream) -> None:
        decoders.Strip("a", 0, 5).decode(["a"])

    limits = limits_with(max_total_tokens=32)
    async with serving(script, template="{{ messages[0].content }}", limits=limits) as edge:
        status, answer, _ = await edge.post(path, body)
        assert (status, "Internal server error" in str(answer)) == (500, True)
        assert (await edge.get("/livez"))[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "named", "last"),
    [
        ("/generate_stream", ASKED, '"error_type":"internal"', "}\n\n"),
        ("/v1/chat/completions", MESSAGES, '"type":"internal"', "data: [DONE]\n\n"),
        ("/v1/completions", {"prompt": "hello"}, '"type":"internal"', "data: [DONE]\n\n"),
        ("/v1/responses", {"input": "hello"}, "event: response.failed\n", "}\n\n"),
        ("/v1/messages", MESSAGES, "event: error\n", "}\n\n"),
    ],
)
async def test_a_panic_in_mid_stream_is_an_error_event_and_no_other_streams(
    path: str, body: dict[str, Any], named: str, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panicking(*_: object) -> None:
        raise panic()

    async with serving(None, template="{{ messages[0].content }}") as edge:

        async def begun() -> tuple[TokenStream, aiohttp.ClientResponse]:
            edge.batcher.arrived.clear()
            sent = asyncio.create_task(edge.client.post(edge.url + path, json=asked))
            await edge.batcher.arrived.wait()
            stream = edge.batcher.streams[-1]
            stream.token(token_event(1, " one"))
            return stream, await sent

        asked = {**body, "stream": True}
        (bad, failed), (good, whole) = await begun(), await begun()
        with monkeypatch.context() as broken:
            broken.setattr(StreamWriter, "token", panicking)
            bad.token(token_event(2, " two"))
        text = (await failed.content.read()).decode()
        assert (failed.status, text.count(named)) == (200, 1)
        assert "Internal server error" in text
        assert text.endswith(last)
        good.token(token_event(2, " two", finished=finished(" one two", 2)))
        text = (await whole.content.read()).decode()
        assert " two" in text
        assert "Internal server error" not in text
        await edge.services.infer.permits.all_free()
        assert (await edge.get("/livez"))[0] == 200


def defective(event: TokenEvent) -> bytes:
    """Render, but for one token."""
    if event.token.text == "odd":
        raise ValueError("odd")
    return b"data: {}\n\n"


async def test_a_late_defect_is_followed_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "plain_frame", defective)
    output = io.BytesIO()
    with logging_to(output):
        async with serving(None, keep_alive_seconds=0.01) as edge:
            reader, writer = await edge.open("/generate_stream", ASKED, connection="close")
            head = await reader.readuntil(b":\n\n")
            edge.batcher.streams[0].token(token_event(1, "odd"))
            text = head + await reader.read()
            writer.close()
    messages = [json.loads(line)["fields"]["message"] for line in output.getvalue().splitlines()]
    assert sorted(messages) == ["request", "stream failed"]
    assert text.count(b"HTTP/1.1 ") == 1
    assert text.endswith(b"0\r\n\r\n")


async def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "WRITE_SECONDS", 0.05)
    output = io.BytesIO()
    writers = watched_writers(monkeypatch)
    with logging_to(output, level="info"):
        async with serving(None) as edge:
            reader, writer = await deaf_client(edge)
            stream = edge.batcher.streams[0]
            index = 0
            while not stream.closed and not (writers and writers[0]._num_bytes):
                index += 1
                stream.token(token_event(index, "x" * 10_000))
                await asyncio.sleep(0)
            async with asyncio.timeout(30):
                await edge.services.infer.permits.all_free()
            assert stream.closed
            assert 'tgi_request_failure{err="dropped"} 1' in await edge.exposition()
            writer.transport.abort()
            assert not reader.at_eof()
    messages = [json.loads(line)["fields"]["message"] for line in output.getvalue().splitlines()]
    assert messages == ["request"]


def watched_writers(monkeypatch: pytest.MonkeyPatch) -> list[StreamWriter]:
    """The writers of all streams to come, in order."""
    writers: list[StreamWriter] = []

    def writer(cut_off: Callable[[], None]) -> StreamWriter:
        writers.append(StreamWriter(cut_off))
        return writers[-1]

    monkeypatch.setattr(sse, "StreamWriter", writer)
    return writers


async def test_a_client_that_leaves_after_the_last_event_has_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = io.BytesIO()
    writers = watched_writers(monkeypatch)
    with logging_to(output):
        async with serving(None) as edge:
            reader, writer = await edge.open("/generate_stream", ASKED)
            stream = edge.batcher.streams[0]
            stream.token(token_event(1, "x"))
            await reader.readuntil(b"\n\n\r\n")
            stream.token(token_event(2, "y", finished=finished("xy", 2)))
            transport = writers[0]._transport
            assert transport is not None
            transport.abort()
            await edge.services.infer.permits.all_free()
            writer.close()
    lines = [json.loads(line)["fields"] for line in output.getvalue().splitlines()]
    (line,) = [line for line in lines if line["message"] == "request"]
    assert (line["status"], line["generated_tokens"]) == (200, 2), lines


async def test_a_client_that_reads_slowly_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    writers = watched_writers(monkeypatch)
    async with serving(None) as edge:
        reader, writer = await deaf_client(edge)
        stream = edge.batcher.streams[0]
        index = 0
        while not writers or writers[0]._num_bytes < MAX_BUFFERED_BYTES // 2:
            index += 1
            stream.token(token_event(index, f"{index} " * 5_000))
            await asyncio.sleep(0)
        stream.token(token_event(index + 1, "end", finished=finished("whole", index + 1)))
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        async with asyncio.timeout(30):
            text = unchunked((await reader.read()).partition(b"\r\n\r\n")[2])
        writer.close()
    events = [json.loads(event[6:]) for event in text.split(b"\n\n")[:-1]]
    assert [event["index"] for event in events] == list(range(1, index + 2))
    assert all(event["token"]["text"].startswith(str(event["index"])) for event in events[:-1])
    assert events[-1]["generated_text"] == "whole"


async def test_a_client_that_is_too_far_behind_is_cut_off_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server cuts the client off long before `WRITE_SECONDS`, so that its frames take no memory."""
    writers = watched_writers(monkeypatch)
    async with serving(None) as edge:
        _, writer = await deaf_client(edge)
        stream = edge.batcher.streams[0]
        most, index = 0, 0
        while not stream.closed:
            index += 1
            stream.token(token_event(index, "x" * 10_000))
            await asyncio.sleep(0)
            most = max([most, *(writer._num_bytes for writer in writers)])
        await edge.services.infer.permits.all_free()
        assert MAX_BUFFERED_BYTES < most < MAX_BUFFERED_BYTES + 20_000
        assert 'tgi_request_failure{err="dropped"} 1' in await edge.exposition()
        writer.transport.abort()


async def test_held_frames_wait_until_the_client_has_read() -> None:
    log: list[object] = []

    class Connection:
        async def drain(self) -> None:
            log.append("drained")

        async def write(self, data: bytes) -> None:
            log.append(data)

    writer = StreamWriter()
    writer.token(b"a")
    writer.token(b"b")
    writer.end()
    await sse._pump(writer, cast("sse._Connection", Connection()), 60.0)
    assert log == ["drained", b"ab", "drained"]


async def test_http_1_0_gets_no_chunks() -> None:
    async with serving(None) as edge:
        reader, writer = await edge.open(
            "/generate_stream", ASKED, version="1.0", connection="close"
        )
        stream = edge.batcher.streams[0]
        stream.token(token_event(1, "a"))
        head = await reader.readuntil(b"\r\n\r\n")
        first = await reader.readuntil(b"\n\n")
        stream.token(token_event(2, "b"))
        second = await reader.readuntil(b"\n\n")
        stream.token(token_event(3, "c", finished=finished("abc", 3)))
        rest = await reader.read()
        writer.close()
    assert b"chunked" not in head.lower()
    texts = [json.loads(event[6:])["token"]["text"] for event in (first, second, rest)]
    assert texts == ["a", "b", "c"]


async def test_a_comment_that_is_not_read_cuts_off_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "WRITE_SECONDS", 0.05)
    monkeypatch.setattr(sse, "KEEP_ALIVE", b":" * 1_000_000 + b"\n\n")
    async with serving(None, keep_alive_seconds=0.01) as edge:
        _, writer = await deaf_client(edge)
        async with asyncio.timeout(30):
            await edge.services.infer.permits.all_free()
        assert edge.batcher.streams[0].closed
        writer.transport.abort()


async def test_a_deadline_that_passes_in_a_real_queue_is_a_status() -> None:
    """Through queue, planner and batcher: the batch has one place, and it is taken."""
    shard = HashShard(num_blocks=2000, max_batch_size=1)
    shards = HeldShards(shard, on_error=nothing)
    batcher = new_batcher(shards, shard, max_batch_size=1)
    limits = limits_with(max_total_tokens=7000)
    long = {"inputs": "a", "parameters": {"max_new_tokens": 6000, "ignore_eos": True}}
    async with serving(None, limits=limits) as edge, asyncio.TaskGroup() as group:
        edge.services.infer._batcher = batcher
        loop = group.create_task(batcher.run())
        running = group.create_task(edge.post("/generate", long))
        while not shard.running:
            await asyncio.sleep(0)
        headers = {"x-max-queue-ms": "1"}
        waiting = group.create_task(edge.post("/generate_stream", ASKED, headers=headers))
        # No step has been answered yet: nothing can be predicted, so it is let in.
        while not len(batcher._waiting):
            await asyncio.sleep(0)
        while not waiting.done():
            shards.release()
            await asyncio.sleep(0)
        assert not running.done()
        status, answer, response = await waiting
        assert edge.services.infer.permits.taken == 1
        running.cancel()
        await edge.services.infer.permits.all_free()
        loop.cancel()
    assert status == 429
    assert answer == {
        "error": "Model is overloaded: the request has waited for as long as it may",
        "error_type": "overloaded",
    }
    assert int(response.headers["retry-after"]) >= 1


class Timeouts:
    """Stands in for the writer's clock: silence after silence, and what happens in each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *silences: Callable[[], None]) -> None:
        self.left = list(silences)
        wait = StreamWriter.wait

        async def silent(writer: StreamWriter, seconds: float) -> bool:
            if not self.left:
                return await wait(writer, seconds)
            self.left.pop(0)()
            return False

        monkeypatch.setattr(StreamWriter, "wait", silent)


def nothing() -> None:
    """Let nothing happen."""


def expire(edge: Edge) -> None:
    for stream in edge.batcher.streams:
        stream.fail(QueueExpired(retry_after_seconds=6.5))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate_stream", ASKED),
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": ["a", "b"], "stream": True}),
    ],
)
async def test_a_request_that_expires_in_the_queue_is_refused_with_429(
    path: str, body: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = {"x-max-queue-ms": "60000"}
    async with serving(None, template="a") as edge:
        patience = Timeouts(monkeypatch, nothing, nothing, lambda: expire(edge))
        status, answer, response = await edge.post(path, body, headers=headers)
        assert patience.left == []
        assert edge.services.infer.permits.taken == 0
        failures = edge.services.metrics.request_failure
        assert failures.labels(err="overloaded").value == len(edge.batcher.streams)
    assert (status, answer["error_type"]) == (429, "overloaded")
    assert response.headers["retry-after"] == "7"


async def test_a_server_with_a_short_longest_wait_refuses_with_the_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(None, max_queue_wait=60.0) as edge:
        Timeouts(monkeypatch, nothing, lambda: expire(edge))
        assert (await edge.post("/generate_stream", ASKED))[0] == 429


@pytest.mark.parametrize("has_deadline", [False, True])
async def test_a_stream_that_can_no_longer_expire_begins_during_silence(
    monkeypatch: pytest.MonkeyPatch, *, has_deadline: bool
) -> None:
    """A request without a deadline after the first silence, one with it once it has left the queue."""
    headers = {"x-max-queue-ms": "60000"} if has_deadline else {}
    async with serving(None) as edge:

        def admit() -> None:
            edge.batcher.streams[0].batched_at = 1.0

        patience = Timeouts(monkeypatch, *([nothing, admit] if has_deadline else [nothing]))
        url = f"{edge.url}/generate_stream"
        async with edge.client.post(url, json=ASKED, headers=headers) as response:
            assert response.status == 200
            assert await response.content.readuntil(b"\n\n") == b":\n\n"
            assert patience.left == []
            expire(edge)
            text = await response.content.read()
    assert json.loads(text[6:])["error_type"] == "overloaded"


async def deaf_client(edge: Edge) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a stream and never read from it."""
    reader, writer = await edge.open("/generate_stream", ASKED, connection="close")
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    return reader, writer


def open_to(writer: StreamWriter, transport: FakeTransport, *, chunked: bool = False) -> None:
    writer.open(cast("asyncio.Transport", transport), chunked=chunked)


async def test_a_full_buffer_closes_it_until_it_is_opened_again() -> None:
    writer, transport = StreamWriter(), FakeTransport()
    open_to(writer, transport)
    big = b"x" * (MAX_UNREAD_BYTES + 1)
    writer.token(big)
    assert await writer.wait(60.0)
    writer.token(b"later")
    assert transport.written == big
    writer.buffer()
    assert writer.drain() == b"later"
    transport.num_unread = 0
    open_to(writer, transport)
    writer.token(b"again")
    assert transport.written == big + b"again"


async def test_a_connection_that_closes_is_the_end() -> None:
    writer, transport = StreamWriter(), FakeTransport()
    open_to(writer, transport)
    transport.closing = True
    writer.token(b"x")
    assert await writer.wait(60.0)
    assert isinstance(writer.error, ConnectionResetError)


async def test_the_first_end_counts_and_nothing_follows_it() -> None:
    writer = StreamWriter()
    writer.token(b"a")
    writer.end()
    writer.token(b"b")
    writer.fail(ValueError("late"))
    assert (writer.drain(), writer.error, writer.ended) == (b"a", None, True)


async def test_the_tail_goes_before_the_end() -> None:
    writer = StreamWriter()
    writer.token(b"a")
    writer.end(b"b", b"c")
    writer.end(b"d")
    assert (writer.drain(), writer.error, writer.ended) == (b"abc", None, True)


async def test_the_frame_after_too_many_cuts_off_and_frees_them() -> None:
    cuts: list[str] = []
    writer = StreamWriter(lambda: cuts.append("cut"))
    frame = b"x" * 2**10
    for _ in range(MAX_BUFFERED_BYTES // len(frame)):
        writer.token(frame)
    # One frame of any size is taken beyond the limit: no client is slow because an answer is long.
    writer.token(frame * 1000)
    assert (cuts, writer.ended) == ([], False)
    writer.token(b"y")
    writer.token(b"z")
    assert cuts == ["cut"]
    assert isinstance(writer.error, ConnectionResetError)
    assert writer.drain() == b""


async def test_frames_that_were_taken_no_longer_count() -> None:
    writer = StreamWriter()
    for _ in range(10):
        writer.token(b"x" * (MAX_BUFFERED_BYTES + 1))
        assert len(writer.drain()) == MAX_BUFFERED_BYTES + 1
    assert writer.error is None


async def test_silence_is_counted_from_the_last_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, transport = StreamWriter(), FakeTransport()
    open_to(writer, transport)
    times = iter([7.0, 11.999, 12.0, 12.0])
    monkeypatch.setattr(writer, "_loop", SimpleNamespace(time=times.__next__))
    writer.token(b"x")
    assert not await writer.wait(5.0)
    assert list(times) == []


def written_to(transport: FakeTransport, *, chunked: bool) -> bytes:
    """The bytes written since the last call."""
    return unchunked(transport.written) if chunked else transport.written


@pytest.mark.parametrize("chunked", [False, True])
@settings(deadline=None, max_examples=100)
@given(steps=st.lists(st.sampled_from(["send", "big", "buffer", "open", "read"]), max_size=40))
def test_frames_always_arrive_once_and_in_order(steps: list[str], *, chunked: bool) -> None:
    async def run() -> None:
        cuts: list[int] = []
        writer, transport = StreamWriter(lambda: cuts.append(1)), FakeTransport()
        sent = received = b""

        def collect() -> bytes:
            written = written_to(transport, chunked=chunked)
            transport.written = b""
            return written

        for number, step in enumerate(steps):
            if step in {"send", "big"}:
                frame = b"%d;" % number + (b"x" * MAX_UNREAD_BYTES if step == "big" else b"")
                unread = len(sent) - len(received + written_to(transport, chunked=chunked))
                writer.token(frame)
                if writer.ended:
                    assert unread > MAX_BUFFERED_BYTES
                    break
                sent += frame
            elif step == "buffer":
                writer.buffer()
            elif step == "open":
                received += collect() + writer.drain()
                open_to(writer, transport, chunked=chunked)
            else:
                transport.num_unread = 0
        received += collect() + writer.drain()
        assert sent == received or (writer.ended and sent.startswith(received))
        assert len(cuts) == writer.ended

    asyncio.run(run())
