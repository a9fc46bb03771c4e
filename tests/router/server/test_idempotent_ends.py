"""How long keyed requests live, over real sockets: readers that leave, failures, the server's end."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from millrace_router.errors import GenerationError
from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_router.server import recording
from millrace_router.server.idempotency import Run, Runs
from millrace_router.server.idempotent_route import RUNS
from millrace_testing.router.edge import (
    Edge,
    finished,
    limits_with,
    logging_to,
    play,
    serving,
    token_event,
)
from millrace_testing.router.idempotent import (
    ASKED,
    CHAT,
    GRACE,
    KEY,
    all_ended,
    begin,
    is_closed,
    keyed_edge,
    num_runs,
    read_events,
    readers,
    streaming,
    until,
)


@pytest.mark.parametrize("path", ["/generate_stream", "/generate", "/v1/chat/completions"])
async def test_without_grace_the_last_to_leave_ends_it(path: str) -> None:
    body = CHAT if "chat" in path else ASKED
    async with keyed_edge(grace=0.0) as (edge, timers):
        asking = [asyncio.create_task(edge.post(path, body, headers=KEY)) for _ in range(2)]
        await until(lambda: readers(edge) == 2 and bool(edge.batcher.streams))
        asking[0].cancel()
        await until(lambda: readers(edge) == 1)
        assert not is_closed(edge)
        asking[1].cancel()
        await edge.services.infer.permits.all_free()
        assert is_closed(edge)
        assert (num_runs(edge), timers.pending) == (0, 0)
        assert 'tgi_request_failure{err="dropped"} 1' in await edge.exposition()


async def test_without_grace_nothing_is_kept_of_what_has_ended() -> None:
    def script(_: ValidRequest, stream: TokenStream) -> None:
        play(stream, " a")

    async with keyed_edge(script, grace=0.0) as (edge, timers):
        for path in ("/generate_stream", "/generate"):
            for _ in range(2):
                assert (await edge.post(path, ASKED, headers=KEY))[0] == 200
                await until(lambda: num_runs(edge) == 0)
        assert len(edge.batcher.streams) == 4
        assert timers.pending == 0


@pytest.mark.parametrize("path", ["/generate_stream", "/generate", "/v1/chat/completions"])
async def test_a_request_is_ended_by_its_key_though_it_could_be_resumed(path: str) -> None:
    body = CHAT if "chat" in path else ASKED
    async with keyed_edge() as (edge, timers):
        asking = asyncio.create_task(edge.post(path, body, headers=KEY))
        await until(lambda: bool(edge.batcher.streams))
        asking.cancel()
        await until(lambda: readers(edge) == 0)
        assert not is_closed(edge)
        for others in ({"authorization": "Bearer other"}, {"x-tenant": "other"}):
            assert (await end(edge, "k", **others))[0] == 410
        assert (await end(edge, "kk"))[0] == 410
        assert not is_closed(edge)
        assert await end(edge, "k") == (200, b"")
        await edge.services.infer.permits.all_free()
        assert is_closed(edge)
        assert (num_runs(edge), timers.pending) == (0, 0)
        assert 'tgi_request_failure{err="dropped"} 1' in await edge.exposition()
        status, answer = await end(edge, "k")
        assert (status, json.loads(answer)["error_type"]) == (410, "not_resumable")
        status, answer = await end(edge, "k" * 256)
        assert (status, json.loads(answer)["error_type"]) == (422, "validation")


async def end(edge: Edge, key: str, **headers: str) -> tuple[int, bytes]:
    """End a request by its key."""
    async with edge.client.delete(f"{edge.url}/v1/requests/{key}", headers=headers) as answer:
        return answer.status, await answer.read()


async def test_grace_runs_out() -> None:
    async with keyed_edge(begin) as (edge, timers):
        async with streaming(edge, "/generate_stream", ASKED) as response:
            await read_events(response, 1)
        await until(lambda: readers(edge) == 0)
        timers.turn(GRACE - 1)
        assert not is_closed(edge)
        timers.turn(1)
        await edge.services.infer.permits.all_free()
        assert is_closed(edge)
        known = KEY | {"last-event-id": "1"}
        status, answer, _ = await edge.post("/generate_stream", ASKED, headers=known)
        assert (status, answer["error_type"]) == (410, "not_resumable")
        chat = CHAT | {"stream": True}
        status, answer, _ = await edge.post("/v1/chat/completions", chat, headers=known)
        assert (status, answer["error"]["type"]) == (410, "not_resumable")
        assert len(edge.batcher.streams) == 1


@pytest.mark.parametrize("num_before", [0, 1])
async def test_a_failed_stream_is_replayed_to_waiting_requests(num_before: int) -> None:
    """Before the first token, waiting requests get its status; later it is replayed."""
    async with keyed_edge() as (edge, _), asyncio.TaskGroup() as group:
        path = "/generate_stream"
        both = [group.create_task(edge.post(path, ASKED, headers=KEY)) for _ in range(2)]
        await until(lambda: readers(edge) == 2 and bool(edge.batcher.streams))
        stream = edge.batcher.streams[0]
        for index in range(1, num_before + 1):
            stream.token(token_event(index, " x"))
        stream.fail(GenerationError("oh"))
        (status, first, _), (_, second, _) = [await one for one in both]
        assert first == second
        assert edge.services.infer.permits.taken == 0
        if num_before:
            assert status == 200
            error = first.split("\n\n")[1] + "\n\n"
            assert json.loads(error[6:])["error_type"] == "generation"
            _, rest, _ = await edge.post(path, ASKED, headers=KEY | {"last-event-id": "1"})
            assert rest == error
            assert len(edge.batcher.streams) == 1
        else:
            assert (status, first["error_type"]) == (424, "generation")
            edge.batcher.script = lambda _, stream: play(stream, " x")
            assert (await edge.post(path, ASKED, headers=KEY))[0] == 200


async def test_waiting_requests_get_the_failure_of_a_whole_answer() -> None:
    async with keyed_edge() as (edge, _), asyncio.TaskGroup() as group:
        both = [group.create_task(edge.post("/generate", ASKED, headers=KEY)) for _ in range(2)]
        await until(lambda: readers(edge) == 2 and bool(edge.batcher.streams))
        edge.batcher.streams[0].fail(GenerationError("oh"))
        assert [(await one)[0] for one in both] == [424, 424]
        edge.batcher.script = lambda _, stream: play(stream, " x")
        assert (await edge.post("/generate", ASKED, headers=KEY))[0] == 200
        assert len(edge.batcher.streams) == 2


async def test_a_defect_of_a_run_without_readers_is_logged() -> None:
    output = io.BytesIO()

    async def work(_: Run) -> None:
        raise ZeroDivisionError("oh")

    with logging_to(output):
        runs = Runs(GRACE)
        run = runs.start(b"scope", b"body", work)
        await until(lambda: run.ended)
    line = json.loads(output.getvalue())
    assert line["level"] == "ERROR"
    assert "ZeroDivisionError: oh" in line["fields"]["exception"]


async def test_a_refusal_is_not_kept() -> None:
    async with keyed_edge(limits=limits_with(max_concurrent_requests=1)) as (edge, _):
        running = asyncio.create_task(edge.post("/generate", ASKED))
        await edge.batcher.arrived.wait()
        assert (await edge.post("/generate", ASKED, headers=KEY))[0] == 429
        play(edge.batcher.streams[0], " x")
        await running
        edge.batcher.script = lambda _, stream: play(stream, " x")
        assert (await edge.post("/generate", ASKED, headers=KEY))[0] == 200


async def test_a_slow_reader_of_a_long_stream_is_cut_off_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recording.Recording.__init__, "__kwdefaults__", {"max_bytes": 2**18})
    async with keyed_edge(begin) as (edge, _):
        async with (
            streaming_deaf(edge) as deaf,
            streaming(edge, "/generate_stream", ASKED) as quick,
        ):
            await until(lambda: readers(edge) == 2)
            await read_events(quick, 1)
            index = 1
            while readers(edge) == 2:
                index += 1
                edge.batcher.streams[0].token(token_event(index, "x" * 10_000))
                assert len(await read_events(quick, 1)) > 10_000
            edge.batcher.streams[0].token(
                token_event(index + 1, "x", finished=finished("x", index + 1))
            )
            assert b'"generated_text":"x"' in await quick.content.read()
            deaf.transport.abort()
        known = KEY | {"last-event-id": "1"}
        status, answer, _ = await edge.post("/generate_stream", ASKED, headers=known)
        assert (status, answer["error_type"]) == (410, "not_resumable")
        assert (await edge.post("/generate_stream", ASKED, headers=KEY))[0] == 410


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_removed_recording_is_freed(*, leaves: bool) -> None:
    """The open connection of the request does not hold it, and no garbage collection is needed."""
    async with keyed_edge() as (edge, timers):
        gc.disable()
        try:
            asking = asyncio.create_task(edge.post("/generate_stream", ASKED, headers=KEY))
            await until(lambda: bool(edge.batcher.streams) and readers(edge) == 1)
            (frames,) = (weakref.ref(r.recording) for r in edge.runner.app[RUNS]._runs.values())
            if leaves:
                edge.batcher.streams[0].token(token_event(1, " a"))
                asking.cancel()
                await until(lambda: readers(edge) == 0)
            else:
                play(edge.batcher.streams[0], " a", " b")
                await asking
                await until(lambda: all_ended(edge))
            assert frames() is not None
            timers.turn(GRACE)
            await edge.services.infer.permits.all_free()
            for _ in range(10):
                await asyncio.sleep(0)
            assert frames() is None
        finally:
            gc.enable()


async def test_draining_ends_runs_without_readers_and_serves_the_others() -> None:
    async with keyed_edge(begin) as (edge, _):
        async with streaming(edge, "/generate_stream", ASKED) as response:
            await read_events(response, 1)
        await until(lambda: readers(edge) == 0)
        edge.batcher.script = None
        whole = asyncio.create_task(edge.post("/generate", ASKED, headers=KEY))
        await until(lambda: len(edge.batcher.streams) == 2)
        edge.runner.app[RUNS].drain()
        edge.services.infer.drain()
        await until(lambda: edge.services.infer.permits.taken == 1)
        assert is_closed(edge)
        status, answer, _ = await edge.post("/generate_stream", ASKED, headers=KEY)
        assert (status, answer["error_type"]) == (503, "unavailable")
        play(edge.batcher.streams[1], " x")
        assert (await whole)[0] == 200
        await until(lambda: num_runs(edge) == 0)


async def test_the_end_of_the_server_ends_what_is_kept() -> None:
    async with serving(begin, resume_grace=GRACE) as edge:
        async with streaming(edge, "/generate_stream", ASKED) as response:
            await read_events(response, 1)
        await until(lambda: readers(edge) == 0)
        assert not is_closed(edge)
    assert is_closed(edge)
    assert edge.services.infer.permits.taken == 0


@asynccontextmanager
async def streaming_deaf(edge: Edge) -> AsyncIterator[asyncio.StreamWriter]:
    """Request a stream on its own connection, and never read from it."""
    host, port = edge.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    # As aiohttp writes it, for it to be the same request.
    body = json.dumps(ASKED).encode()
    writer.write(
        b"POST /generate_stream HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"idempotency-key: k\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    await edge.batcher.arrived.wait()
    yield writer
    writer.transport.abort()
