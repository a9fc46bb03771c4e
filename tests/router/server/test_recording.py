"""One recording, many resumed streams: each gets the same bytes from its position on, once and in order."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.errors import RouterError
from millrace_router.server.recording import Recording, ResumedStream, SseOptions
from millrace_router.server.stream_writer import MAX_UNREAD_BYTES
from millrace_testing.router.sse import FakeTransport

OPTIONS = SseOptions(
    headers={},
    keep_alive_seconds=60.0,
    may_expire=lambda: True,
    on_error=lambda error: b"error: %b\n\n" % str(error).encode(),
)


def render(error: Exception) -> bytes:
    return b"error: %b\n\n" % str(error).encode()


def new_recording(max_bytes: int = 2**30) -> Recording:
    return Recording(OPTIONS, render, max_bytes=max_bytes)


def open_to(resumed: ResumedStream, transport: FakeTransport) -> None:
    resumed.open(cast("asyncio.Transport", transport), chunked=False)


def everything(resumed: ResumedStream) -> bytes:
    """Take until nothing is left, as the pump does."""
    return b"".join(iter(resumed.drain, b""))


def frame(index: int, size: int = 1) -> bytes:
    return b"data: %d%b\n\n" % (index, b"x" * size)


def numbered(index: int, size: int = 1) -> bytes:
    return b"id: %d\n%b" % (index, frame(index, size))


async def test_tokens_are_numbered_and_the_tail_is_not() -> None:
    recording = new_recording()
    recording.token(b"data: a\n\n")
    recording.token(b"data: b\n\n")
    recording.end(b"data: usage\n\n", b"data: [DONE]\n\n")
    recording.token(b"late")
    recording.end(b"later")
    recording.fail(ValueError("latest"))
    with ResumedStream(recording, 0) as resumed:
        assert await resumed.wait(60.0)
        assert everything(resumed) == (
            b"id: 1\ndata: a\n\nid: 2\ndata: b\n\ndata: usage\n\ndata: [DONE]\n\n"
        )
    with ResumedStream(recording, 2) as resumed:
        assert everything(resumed) == b"data: usage\n\ndata: [DONE]\n\n"
    assert (recording.num_tokens, recording.error) == (2, None)
    await recording.wait()


async def test_an_error_in_mid_stream_is_the_last_frame_of_every_resumed_stream() -> None:
    recording = new_recording()
    with ResumedStream(recording, 0) as early:
        recording.token(frame(1))
        recording.fail(RouterError("oh"))
        assert everything(early) == numbered(1) + b"error: oh\n\n"
        assert (early.ended, early.error) == (True, None)
    with ResumedStream(recording, 1) as late:
        assert (everything(late), late.ended, late.error) == (b"error: oh\n\n", True, None)


async def test_an_error_before_the_first_token_is_for_the_status() -> None:
    recording, error = new_recording(), RouterError("oh")
    with ResumedStream(recording, 0) as early:
        recording.fail(error)
        with ResumedStream(recording, 0) as late:
            for resumed in (early, late):
                assert await resumed.wait(60.0)
                assert (resumed.drain(), resumed.ended, resumed.error) == (b"", True, error)


async def test_an_ended_recording_holds_no_request() -> None:
    """`may_expire` knows the generation, and that the prompt."""
    recording = new_recording()
    assert recording.options.may_expire()
    recording.end()
    assert not recording.options.may_expire()


async def test_a_long_stream_drops_its_beginning_and_cuts_off_slow_readers() -> None:
    cuts: list[str] = []
    recording = new_recording(max_bytes=1000)
    with (
        ResumedStream(recording, 0, lambda: cuts.append("deaf")) as deaf,
        ResumedStream(recording, 0, lambda: cuts.append("quick")) as quick,
    ):
        received = sent = b""
        for index in range(1, 101):
            recording.token(frame(index, 50))
            sent += numbered(index, 50)
            assert recording.num_bytes <= 1000
            received += everything(quick)
        assert received == sent
        assert cuts == ["deaf"]
        assert deaf.drain() == b""
        assert isinstance(deaf.error, ConnectionResetError)
        assert quick.error is None
    assert recording.end_position == 100
    first = recording.first
    assert 80 < first < 100
    with ResumedStream(recording, first) as resumed:
        assert everything(resumed) == b"".join(
            numbered(index, 50) for index in range(first + 1, 101)
        )


async def test_a_frame_larger_than_the_limit_is_the_only_one_kept() -> None:
    recording = new_recording(max_bytes=10)
    recording.token(frame(1))
    recording.token(frame(2, 100))
    assert (recording.first, recording.end_position) == (1, 2)


@pytest.mark.parametrize("size", [1, MAX_UNREAD_BYTES])
async def test_a_resumed_stream_takes_a_buffer_full_at_a_time(size: int) -> None:
    recording = new_recording()
    for index in range(1, 20_000 if size == 1 else 4):
        recording.token(frame(index, size))
    with ResumedStream(recording, 0) as resumed:
        assert MAX_UNREAD_BYTES <= len(resumed.drain()) < MAX_UNREAD_BYTES + size + 100


class Reader:
    """A resumed stream, the connection that it writes to, and everything that it received."""

    def __init__(self, recording: Recording, position: int) -> None:
        self.recording, self.position = recording, position
        self.resumed, self.transport = ResumedStream(recording, position), FakeTransport()
        self.resumed.__enter__()
        self.received = b""

    def after(self, step: str) -> Reader:
        """Take one step; the reader that goes on, which is another one after a reconnect."""
        if step == "buffer":
            self.resumed.buffer()
        elif step == "read":
            self.transport.num_unread = 0
        elif step == "open":
            self.received = self.all_received()
            open_to(self.resumed, self.transport)
        else:
            self._collect()
            self.resumed.__exit__()
            return Reader(self.recording, self.position + self.received.count(b"id: "))
        return self

    def all_received(self) -> bytes:
        self._collect()
        self.resumed.buffer()
        return self.received + everything(self.resumed)

    def _collect(self) -> None:
        self.received += self.transport.written
        self.transport.written = b""


@settings(deadline=None, max_examples=200)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["send", "big", "join", "buffer", "open", "read", "leave"]),
            st.integers(0, 50),
        ),
        max_size=60,
    ),
    tail=st.integers(0, 2),
)
def test_readers_that_join_and_leave_at_any_time_read_the_same(
    steps: list[tuple[str, int]], tail: int
) -> None:
    async def run() -> None:
        recording, sent, readers = new_recording(), list[bytes](), list[Reader]()
        for step, number in steps:
            if step in {"send", "big"}:
                index, size = len(sent) + 1, MAX_UNREAD_BYTES if step == "big" else 1
                recording.token(frame(index, size))
                sent.append(numbered(index, size))
            elif step == "join":
                readers.append(Reader(recording, number % (len(sent) + 1)))
            elif readers:
                place = number % len(readers)
                readers[place] = readers[place].after(step)
        rest = [b"data: tail\n\n"] * tail
        recording.end(*rest)
        for reader in readers:
            assert reader.resumed.ended
            assert reader.all_received() == b"".join((sent + rest)[reader.position :])

    asyncio.run(run())
