"""Frames reach the transport at once, or wait in order; nothing is lost or sent twice."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.server.stream_writer import MAX_BUFFERED_BYTES, MAX_UNREAD_BYTES, StreamWriter
from millrace_testing.router.sse import FakeTransport, unchunked


def open_to(writer: StreamWriter, transport: FakeTransport, *, chunked: bool = False) -> None:
    writer.open(cast("asyncio.Transport", transport), chunked=chunked)


async def test_frames_are_chunks_of_http_1_1() -> None:
    writer, transport = StreamWriter(), FakeTransport()
    open_to(writer, transport, chunked=True)
    writer.token(b"data: 1\n\n")
    writer.token(b"x" * 300)
    assert transport.written == b"9\r\ndata: 1\n\n\r\n12c\r\n" + b"x" * 300 + b"\r\n"


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


async def test_what_has_been_taken_counts_no_more() -> None:
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
def test_whatever_happens_frames_arrive_once_and_in_order(
    steps: list[str], *, chunked: bool
) -> None:
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
