"""Idempotent runs: which requests share one, its lifetime, and its memory. No sockets, and no real time."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import re
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from millrace_router.errors import GenerationError, ShuttingDown, ValidationError
from millrace_router.server import recording
from millrace_router.server.idempotency import (
    Run,
    Runs,
    WholeAnswer,
    digest_of,
    last_event_of,
    scope_of,
)
from millrace_router.server.idempotent_route import RUNS
from millrace_router.server.recording import Recording, SseOptions
from millrace_testing.router.edge import (
    Edge,
    FakeTimers,
    finished,
    limits_with,
    logging_to,
    play,
    plays,
    serving,
    token_event,
)
from millrace_testing.router.idempotent import (
    ASKED,
    CHAT,
    GRACE,
    KEY,
    NUM_TOKENS,
    advance,
    all_ended,
    begin,
    index_of,
    is_closed,
    keyed_edge,
    num_runs,
    prompts_of,
    read_events,
    readers,
    streaming,
    until,
)

OPTIONS = SseOptions(
    headers={}, keep_alive_seconds=60.0, may_expire=bool, on_error=lambda _: b"error\n\n"
)


class Work:
    """A request that goes on until the test says how it ends."""

    def __init__(self) -> None:
        self.end: asyncio.Future[WholeAnswer | None] = asyncio.get_running_loop().create_future()
        self.cancelled = False
        self.recording: Recording | None = None

    def was_cancelled(self) -> bool:
        return self.cancelled

    async def __call__(self, run: Run) -> WholeAnswer | None:
        if self.recording is not None:
            run.record(self.recording)
        try:
            return await self.end
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    def records(self) -> Recording:
        self.recording = Recording(OPTIONS, lambda _: b"error\n\n")
        return self.recording


async def turns() -> None:
    """Let tasks that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


def answer(size: int = 2) -> WholeAnswer:
    return WholeAnswer(200, {}, b"x" * size)


def test_a_key_belongs_to_its_caller_and_its_path() -> None:
    asked = {"idempotency-key": "k", "authorization": "Bearer a", "x-tenant": "t"}
    scopes = [
        scope_of(headers, path)
        for headers, path in (
            (asked, "/generate"),
            (asked, "/"),
            (asked | {"idempotency-key": "K"}, "/generate"),
            (asked | {"authorization": "Bearer b"}, "/generate"),
            (asked | {"x-tenant": "u"}, "/generate"),
            ({"idempotency-key": "k"}, "/generate"),
        )
    ]
    assert len(set(scopes)) == len(scopes)
    assert scope_of(dict(asked), "/generate") == scopes[0]
    assert scope_of({"authorization": "Bearer a"}, "/generate") is None


def test_a_digest_distinguishes_its_parts() -> None:
    assert len({digest_of("ab", "c"), digest_of("a", "bc"), digest_of("abc"), digest_of()}) == 4
    assert digest_of("é\udcff") == digest_of("é".encode() + b"\xff")


@pytest.mark.parametrize("key", ["", "x" * 256])
def test_a_key_is_neither_empty_nor_long(key: str) -> None:
    with pytest.raises(ValidationError, match=f"1 to 255 characters. Given: {len(key)}"):
        scope_of({"idempotency-key": key}, "/")


@pytest.mark.parametrize("text", ["", "0", "00", "-1", "+1", " 1", "1.0", "x", "\u0661", "1" * 10])
def test_wrong_indexes_are_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="id of an event of this stream"):
        last_event_of({"last-event-id": text})


def test_an_index_is_read() -> None:
    assert (last_event_of({}), last_event_of({"last-event-id": "17"})) == (0, 17)


async def test_a_run_that_is_left_before_its_first_step_is_ended_too() -> None:
    runs, work = Runs(0.0), Work()
    run = runs.start(b"s", b"", work)
    with runs.reading(b"s", run):
        pass
    await turns()
    assert run.ended
    with pytest.raises(ShuttingDown):
        await run.answer()
    assert len(runs) == 0


async def test_an_aborted_run_is_not_kept() -> None:
    """A stream that has begun is removed too, so no request finds it."""
    timers = FakeTimers()
    runs, work = Runs(GRACE, call_later=timers), Work()
    recording = work.records()
    run = runs.start(b"s", b"", work)
    with runs.reading(b"s", run):
        await run.answer()
        recording.token(b"data: 1\n\n")
    timers.turn(GRACE)
    await turns()
    assert work.was_cancelled()
    assert recording.ended
    assert (len(runs), timers.pending) == (0, 0)


@pytest.mark.parametrize("was_left", [False, True])
async def test_an_ended_run_is_kept_for_the_grace_period(*, was_left: bool) -> None:
    timers = FakeTimers()
    runs, work = Runs(GRACE, call_later=timers), Work()
    run = runs.start(b"s", b"", work)
    with runs.reading(b"s", run):
        if not was_left:
            work.end.set_result(answer())
            await turns()
    if was_left:
        timers.turn(GRACE - 1)
        work.end.set_result(answer())
        await turns()
    timers.turn(GRACE - 1)
    assert runs.find(b"s", b"") is run
    with runs.reading(b"s", run):
        # A reader does not prolong the lifetime of a run, and can finish reading.
        timers.turn(1)
        assert runs.find(b"s", b"") is None
        assert await run.answer() == answer()
    assert (len(runs), timers.pending) == (0, 0)


async def test_a_defect_after_the_beginning_ends_the_stream() -> None:
    runs, work = Runs(0.0), Work()
    recording = work.records()
    run = runs.start(b"s", b"", work)
    with runs.reading(b"s", run):
        recording.token(b"data: 1\n\n")
        work.end.set_exception(ValueError("odd"))
        await recording.wait()
    assert recording.frames_from(1, 100) == [b"error\n\n"]


async def test_the_least_recently_used_answer_is_dropped_first() -> None:
    timers = FakeTimers()
    runs = Runs(GRACE, call_later=timers, max_kept=2)
    started: dict[bytes, Run] = {}
    for scope in (b"a", b"b", b"running", b"c"):
        work = Work()
        started[scope] = runs.start(scope, b"", work)
        if scope != b"running":
            work.end.set_result(answer())
            await turns()
        if scope == b"b":
            assert runs.find(b"a", b"") is not None
    assert [scope for scope in (b"a", b"b", b"c", b"running") if runs.find(scope, b"")] == [
        b"a",
        b"c",
        b"running",
    ]
    assert timers.pending == 2
    with runs.reading(b"running", started[b"running"]):
        pass
    await runs.close()


async def test_the_bytes_of_kept_runs_are_bounded() -> None:
    runs = Runs(GRACE, call_later=FakeTimers(), max_kept_bytes=100)
    for scope, size in ((b"a", 60), (b"b", 30), (b"c", 20), (b"d", 101)):
        work = Work()
        if scope == b"b":
            recording = work.records()
            recording.token(b"x" * (size - len(b"id: 1\n")))
            recording.end()
            work.end.set_result(None)
        else:
            work.end.set_result(answer(size))
        runs.start(scope, b"", work)
        await turns()
        kept = [scope for scope in (b"a", b"b", b"c", b"d") if runs._runs.get(scope)]
        assert kept == {b"a": [b"a"], b"b": [b"a", b"b"], b"c": [b"b", b"c"], b"d": []}[scope]


async def test_draining_ends_runs_without_readers_now_or_later() -> None:
    timers = FakeTimers()
    runs = Runs(GRACE, call_later=timers)
    left, read, ended = Work(), Work(), Work()
    with runs.reading(b"left", runs.start(b"left", b"", left)):
        pass
    runs.start(b"ended", b"", ended)
    ended.end.set_result(answer())
    await turns()
    run = runs.start(b"read", b"", read)
    with runs.reading(b"read", run):
        runs.drain()
        await turns()
        assert (left.cancelled, read.cancelled, len(runs)) == (True, False, 1)
    await turns()
    assert (read.cancelled, len(runs), timers.pending) == (True, 0, 0)


async def test_closing_ends_everything() -> None:
    timers = FakeTimers()
    runs, works = Runs(GRACE, call_later=timers), [Work(), Work()]
    for number, work in enumerate(works):
        runs.start(bytes([number]), b"", work)
    run = runs.find(b"\x00", b"")
    assert run is not None
    with runs.reading(b"\x00", run):
        await turns()
        await runs.close()
        with pytest.raises(ShuttingDown):
            await run.answer()
    assert all(work.cancelled for work in works)
    assert (len(runs), timers.pending) == (0, 0)


STREAMS = [
    ("/generate_stream", ASKED),
    ("/", ASKED | {"stream": True}),
    ("/v1/chat/completions", CHAT | {"stream": True}),
    (
        "/v1/chat/completions",
        CHAT | {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True},
    ),
    ("/v1/chat/completions", CHAT | {"stream": True, "n": 2}),
    ("/v1/completions", {"prompt": ["a", "b"], "stream": True}),
    (
        "/v1/completions",
        {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}},
    ),
]
WHOLE = [
    ("/generate", ASKED),
    ("/", ASKED),
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": ["a", "b"]}),
]


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_a_dropped_stream_resumes_at_every_token(path: str, body: dict[str, object]) -> None:
    """Its two parts are what another reader got undisturbed, to the byte; for every place, before and after the end."""
    prompts = prompts_of(body)
    # A choice of a chat begins with an event without a token.
    events_before = prompts if "chat" in path else 0
    for num_rounds in range(NUM_TOKENS + 1):
        for num_read in range(num_rounds * prompts + (events_before if num_rounds else 0) + 1):
            async with keyed_edge() as (edge, _), asyncio.TaskGroup() as group:
                undisturbed = group.create_task(edge.post(path, body, headers=KEY))
                await until(lambda: len(edge.batcher.streams) == prompts)
                for index in range(1, num_rounds + 1):
                    advance(edge, index)
                head = b""
                if num_read:
                    async with streaming(edge, path, body) as response:
                        head = await read_events(response, num_read)
                        for index in range(num_rounds + 1, NUM_TOKENS + 1):
                            advance(edge, index)
                else:
                    for index in range(num_rounds + 1, NUM_TOKENS + 1):
                        advance(edge, index)
                known = {"last-event-id": str(num_read)} if num_read else {}
                status, tail, _ = await edge.post(path, body, headers=KEY | known)
                whole = (await undisturbed)[1]
                assert status == 200
                assert head.decode() + tail == whole
                ids = [int(number) for number in re.findall(r"^id: (\d+)$", whole, re.MULTILINE)]
                assert ids == list(range(1, NUM_TOKENS * prompts + events_before + 1))
                assert len(edge.batcher.streams) == prompts


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", CHAT | {"stream": True}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 8, "stream": True}),
    ],
)
async def test_a_stream_of_named_events_resumes_after_any(
    path: str, body: dict[str, object]
) -> None:
    async with keyed_edge(plays(" a", " b", " c")) as (edge, _):
        _, whole, _ = await edge.post(path, body, headers=KEY)
        blocks = whole.removesuffix("\n\n").split("\n\n")
        num_numbered = sum(block.startswith("id: ") for block in blocks)
        assert num_numbered > 3
        for index in range(1, num_numbered + 1):
            known = {"last-event-id": str(index)}
            _, rest, _ = await edge.post(path, body, headers=KEY | known)
            assert rest == "".join(block + "\n\n" for block in blocks[index:])
        assert len(edge.batcher.requests) == 1


async def test_a_resumed_stream_goes_on_live() -> None:
    async with keyed_edge(begin) as (edge, timers):
        async with streaming(edge, "/generate_stream", ASKED) as response:
            await read_events(response, 1)
        await until(lambda: readers(edge) == 0)
        advance(edge, 2)
        timers.turn(GRACE - 1)
        known = {"last-event-id": "1"}
        async with streaming(edge, "/generate_stream", ASKED, **known) as response:
            assert index_of(await read_events(response, 1)) == 2
            timers.turn(GRACE)
            for index in (3, 4):
                advance(edge, index)
                assert index_of(await read_events(response, 1)) == index
            assert await response.content.read() == b""


async def test_without_a_key_streams_are_as_ever() -> None:
    """The bytes are the same except for the ids, and unknown ids are ignored."""

    async with keyed_edge(plays(" a", " b")) as (edge, _):
        _, keyed, _ = await edge.post("/generate_stream", ASKED, headers=KEY)
        _, plain, _ = await edge.post("/generate_stream", ASKED, headers={"last-event-id": "7"})
    assert "id: " not in plain
    assert re.sub(r"id: \d+\n", "", keyed) == plain
    assert len(edge.batcher.streams) == 2


@pytest.mark.parametrize(("path", "body"), WHOLE)
async def test_whole_answers_with_the_same_key_are_the_same(
    path: str, body: dict[str, object]
) -> None:
    prompts = prompts_of(body)
    async with (
        keyed_edge(limits=limits_with(max_concurrent_requests=prompts)) as (edge, timers),
        asyncio.TaskGroup() as group,
    ):
        both = [group.create_task(edge.post(path, body, headers=KEY)) for _ in range(2)]
        await until(lambda: readers(edge) == 2 and len(edge.batcher.streams) == prompts)
        for stream in edge.batcher.streams:
            play(stream, " a", " b")
        (status, first, response), (_, second, again) = [await one for one in both]
        timers.turn(GRACE - 1)
        _, third, late = await edge.post(path, body, headers=KEY)
        assert status == 200
        assert first == second == third
        own = {"x-request-id", "date"}
        for other in (again, late):
            assert {k: v for k, v in other.headers.items() if k.lower() not in own} == {
                k: v for k, v in response.headers.items() if k.lower() not in own
            }
        assert response.headers["x-request-id"] != again.headers["x-request-id"]
        assert len(edge.batcher.streams) == prompts
        timers.turn(1)
        assert num_runs(edge) == 0


@pytest.mark.parametrize(("path", "body"), WHOLE)
@pytest.mark.parametrize("has_ended", [False, True])
async def test_a_dropped_call_is_answered_when_it_is_sent_again(
    path: str, body: dict[str, object], *, has_ended: bool
) -> None:
    prompts = prompts_of(body)
    async with keyed_edge() as (edge, timers):
        dropped = asyncio.create_task(edge.post(path, body, headers=KEY))
        await until(lambda: readers(edge) == 1 and len(edge.batcher.streams) == prompts)
        dropped.cancel()
        await until(lambda: readers(edge) == 0)
        timers.turn(GRACE - 1)
        assert not any(stream.closed for stream in edge.batcher.streams)
        if has_ended:
            for stream in edge.batcher.streams:
                play(stream, " a", " b")
            await until(lambda: all_ended(edge))
            # Its end has begun the period anew.
            timers.turn(GRACE - 1)
        again = asyncio.create_task(edge.post(path, body, headers=KEY))
        if not has_ended:
            await until(lambda: readers(edge) == 1)
            timers.turn(GRACE)
            for stream in edge.batcher.streams:
                play(stream, " a", " b")
        status, answer, _ = await again
        assert status == 200
        assert " a b" in json.dumps(answer)
        assert len(edge.batcher.streams) == prompts


async def test_two_clients_can_read_a_stream_at_once() -> None:
    async with (
        keyed_edge(begin, grace=0.0) as (edge, _),
        streaming(edge, "/generate_stream", ASKED) as first,
    ):
        early = await read_events(first, 1)
        async with streaming(edge, "/generate_stream", ASKED) as second:
            assert await read_events(second, 1) == early
            for index in range(2, NUM_TOKENS + 1):
                advance(edge, index)
                assert await read_events(second, 1) == await read_events(first, 1)
        assert await first.content.read() == b""
        assert len(edge.batcher.streams) == 1


async def test_callers_share_nothing() -> None:
    async with keyed_edge(plays(" a")) as (edge, _):
        for caller in ({}, {"authorization": "Bearer a"}, {"x-tenant": "a"}, {"x-tenant": "b"}):
            for _ in range(2):
                assert (await edge.post("/generate", ASKED, headers=KEY | caller))[0] == 200
        assert len(edge.batcher.streams) == 4


async def test_contradictory_uses_of_a_key_are_refused() -> None:
    async with keyed_edge(plays(" a", " b")) as (edge, _):
        other = ASKED | {"inputs": "b"}
        assert (await edge.post("/generate_stream", ASKED, headers=KEY))[0] == 200
        assert (await edge.post("/generate", ASKED, headers=KEY))[0] == 200
        for body, path, headers, message in (
            (other, "/generate_stream", KEY, "has been used for a request with another body"),
            (ASKED, "/generate_stream", {"idempotency-key": ""}, "1 to 255 characters. Given: 0"),
            (ASKED, "/generate", {"idempotency-key": "k" * 256}, "characters. Given: 256"),
            (ASKED, "/generate_stream", KEY | {"last-event-id": "3"}, "id of an event"),
            (ASKED, "/generate_stream", KEY | {"last-event-id": "x"}, "id of an event"),
            (ASKED, "/generate", KEY | {"last-event-id": "1"}, "id of an event"),
        ):
            status, answer, _ = await edge.post(path, body, headers=headers)
            assert (status, answer["error_type"]) == (422, "validation")
            assert message in answer["error"]
        assert len(edge.batcher.streams) == 2
        assert 'tgi_request_failure{err="validation"} 6' in await edge.exposition()
        longest = {"idempotency-key": "k" * 255}
        assert (await edge.post("/generate", ASKED, headers=longest))[0] == 200


async def test_a_body_that_is_too_long_is_refused_before_it_is_compared() -> None:
    async with keyed_edge(payload_limit=1000) as (edge, _):
        long = ASKED | {"inputs": "a" * 1000}
        status, answer, _ = await edge.post("/generate", long, headers=KEY)
    assert (status, answer["error_type"]) == (413, "validation")


async def test_silence_is_broken_for_every_reader() -> None:
    async with keyed_edge(keep_alive_seconds=0.01) as (edge, _):
        async with (
            streaming(edge, "/generate_stream", ASKED) as first,
            streaming(edge, "/generate_stream", ASKED) as second,
        ):
            assert await read_events(first, 2) == await read_events(second, 2) == b":\n\n" * 2
        await until(lambda: readers(edge) == 0)


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


async def test_without_grace_no_ended_run_is_kept() -> None:
    async with keyed_edge(plays(" a"), grace=0.0) as (edge, timers):
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
            edge.batcher.script = plays(" x")
            assert (await edge.post(path, ASKED, headers=KEY))[0] == 200


async def test_waiting_requests_get_the_failure_of_a_whole_answer() -> None:
    async with keyed_edge() as (edge, _), asyncio.TaskGroup() as group:
        both = [group.create_task(edge.post("/generate", ASKED, headers=KEY)) for _ in range(2)]
        await until(lambda: readers(edge) == 2 and bool(edge.batcher.streams))
        edge.batcher.streams[0].fail(GenerationError("oh"))
        assert [(await one)[0] for one in both] == [424, 424]
        edge.batcher.script = plays(" x")
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
        edge.batcher.script = plays(" x")
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


async def test_runs_without_readers_are_at_most_a_quarter_of_the_permits() -> None:
    limits = limits_with(max_concurrent_requests=8)
    async with keyed_edge(begin, limits=limits) as (edge, _):
        for number in range(4):
            headers = {"idempotency-key": str(number)}
            async with streaming(edge, "/generate_stream", ASKED, **headers) as response:
                await read_events(response, 1)
            await until(lambda: readers(edge) == 0)
        await until(lambda: edge.services.infer.permits.taken == 2)
        assert [stream.closed for stream in edge.batcher.streams] == [True, True, False, False]


async def test_a_run_that_needs_a_permit_does_not_end_itself() -> None:
    runs, has_left = Runs(GRACE, call_later=FakeTimers()), asyncio.Event()

    async def work(_: Run) -> WholeAnswer:
        await has_left.wait()
        await runs.make_room(2)
        return WholeAnswer(200, {}, b"answer")

    run = runs.start(b"scope", b"digest", work)
    with runs.reading(b"scope", run):
        pass
    has_left.set()
    assert await run.answer() == WholeAnswer(200, {}, b"answer")
    await runs.close()


async def test_a_full_server_ends_runs_without_readers_first() -> None:
    async with keyed_edge(begin, limits=limits_with(max_concurrent_requests=1)) as (edge, _):
        async with streaming(edge, "/generate_stream", ASKED) as response:
            await read_events(response, 1)
        await until(lambda: readers(edge) == 0)
        assert not is_closed(edge)
        edge.batcher.script = plays(" x")
        assert (await edge.post("/generate", ASKED))[0] == 200
        assert edge.batcher.streams[0].closed
        assert edge.services.infer.permits.taken == 0


async def test_the_end_of_the_server_ends_kept_runs() -> None:
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
    _, writer = await edge.open("/generate_stream", ASKED, **KEY)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    yield writer
    writer.transport.abort()
