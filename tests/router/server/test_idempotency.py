"""Idempotent runs: which requests share one, its lifetime, and its memory. No sockets, and no real time."""

from __future__ import annotations

import asyncio

import pytest

from millrace_router.errors import GenerationError, ShuttingDown, ValidationError
from millrace_router.server.idempotency import (
    Run,
    Runs,
    WholeAnswer,
    digest_of,
    last_event_of,
    scope_of,
)
from millrace_router.server.recording import Recording, SseOptions
from millrace_testing.router.timers import FakeTimers

OPTIONS = SseOptions(
    headers={}, keep_alive_seconds=60.0, may_expire=bool, on_error=lambda _: b"error\n\n"
)
GRACE = 10.0


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


def test_a_digest_tells_its_parts_apart() -> None:
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


async def test_the_same_key_is_the_same_run_but_for_another_body() -> None:
    runs, work = Runs(0.0), Work()
    assert runs.find(b"s", b"body") is None
    run = runs.start(b"s", b"body", work)
    with runs.reading(b"s", run), runs.reading(b"s", run):
        assert runs.find(b"s", b"body") is run
        with pytest.raises(ValidationError, match="another body"):
            runs.find(b"s", b"other")
        work.end.set_result(answer())
        assert await run.answer() == await run.answer() == answer()
    assert len(runs) == 0


async def test_without_grace_the_last_reader_ends_it() -> None:
    timers = FakeTimers()
    runs, work = Runs(0.0, call_later=timers), Work()
    run = runs.start(b"s", b"", work)
    with runs.reading(b"s", run):
        with runs.reading(b"s", run):
            await turns()
        await turns()
        assert not work.was_cancelled()
    await turns()
    assert work.was_cancelled()
    assert (len(runs), timers.pending, runs.find(b"s", b"")) == (0, 0, None)


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


async def test_with_grace_it_waits_for_its_reader() -> None:
    timers = FakeTimers()
    runs, work = Runs(GRACE, call_later=timers), Work()
    run = runs.start(b"s", b"", work)
    for _ in range(3):
        with runs.reading(b"s", run):
            timers.turn(GRACE * 2)
            await turns()
        timers.turn(GRACE - 1)
        await turns()
        assert not work.was_cancelled()
        assert runs.find(b"s", b"") is run
    timers.turn(1)
    await turns()
    assert work.was_cancelled()
    assert (len(runs), timers.pending) == (0, 0)


async def test_what_was_aborted_is_kept_no_longer() -> None:
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
async def test_what_has_ended_is_kept_for_the_grace_period(*, was_left: bool) -> None:
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


async def test_only_current_readers_get_a_failure() -> None:
    timers = FakeTimers()
    runs, work = Runs(GRACE, call_later=timers), Work()
    run = runs.start(b"s", b"", work)
    with runs.reading(b"s", run):
        work.end.set_exception(GenerationError("oh"))
        for _ in range(2):
            with pytest.raises(GenerationError, match="oh"):
                await run.answer()
        assert runs.find(b"s", b"") is None
    assert (len(runs), timers.pending) == (0, 0)


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_stream_that_failed_is_kept_if_it_has_begun(*, has_begun: bool) -> None:
    runs, work = Runs(GRACE, call_later=FakeTimers()), Work()
    recording = work.records()
    run = runs.start(b"s", b"", work)
    with runs.reading(b"s", run):
        assert await run.answer() is recording
        if has_begun:
            recording.token(b"data: 1\n\n")
        recording.fail(GenerationError("oh"))
        work.end.set_result(None)
        await turns()
    assert (runs.find(b"s", b"") is run) == has_begun


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


async def test_their_bytes_are_bounded() -> None:
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
