"""Frames reach the transport at once, or wait in order; nothing is lost or sent twice."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.server.stream_writer import MAX_HELD_BYTES, MAX_UNREAD_BYTES, StreamWriter
from millrace_testing.router.sse import FakeTransport, unchunked


def open_to(outlet: StreamWriter, transport: FakeTransport, *, chunked: bool = False) -> None:
    outlet.open(cast("asyncio.Transport", transport), chunked=chunked)


async def test_frames_are_chunks_of_http_1_1() -> None:
    outlet, transport = StreamWriter(), FakeTransport()
    open_to(outlet, transport, chunked=True)
    outlet.token(b"data: 1\n\n")
    outlet.token(b"x" * 300)
    assert transport.written == b"9\r\ndata: 1\n\n\r\n12c\r\n" + b"x" * 300 + b"\r\n"


async def test_a_full_buffer_closes_it_until_it_is_opened_again() -> None:
    outlet, transport = StreamWriter(), FakeTransport()
    open_to(outlet, transport)
    big = b"x" * (MAX_UNREAD_BYTES + 1)
    outlet.token(big)
    assert await outlet.news(60.0)
    outlet.token(b"later")
    assert transport.written == big
    outlet.hold()
    assert outlet.take() == b"later"
    transport.num_unread = 0
    open_to(outlet, transport)
    outlet.token(b"again")
    assert transport.written == big + b"again"


async def test_a_connection_that_closes_is_the_end() -> None:
    outlet, transport = StreamWriter(), FakeTransport()
    open_to(outlet, transport)
    transport.closing = True
    outlet.token(b"x")
    assert await outlet.news(60.0)
    assert isinstance(outlet.error, ConnectionResetError)


async def test_the_first_end_counts_and_nothing_follows_it() -> None:
    outlet = StreamWriter()
    outlet.token(b"a")
    outlet.end()
    outlet.token(b"b")
    outlet.fail(ValueError("late"))
    assert (outlet.take(), outlet.error, outlet.ended) == (b"a", None, True)


async def test_the_tail_goes_before_the_end() -> None:
    outlet = StreamWriter()
    outlet.token(b"a")
    outlet.end(b"b", b"c")
    outlet.end(b"d")
    assert (outlet.take(), outlet.error, outlet.ended) == (b"abc", None, True)


async def test_the_frame_after_too_many_cuts_off_and_frees_them() -> None:
    cuts: list[str] = []
    outlet = StreamWriter(lambda: cuts.append("cut"))
    frame = b"x" * 2**10
    for _ in range(MAX_HELD_BYTES // len(frame)):
        outlet.token(frame)
    # One frame of any size is taken beyond the limit: no client is slow because an answer is long.
    outlet.token(frame * 1000)
    assert (cuts, outlet.ended) == ([], False)
    outlet.token(b"y")
    outlet.token(b"z")
    assert cuts == ["cut"]
    assert isinstance(outlet.error, ConnectionResetError)
    assert outlet.take() == b""


async def test_what_has_been_taken_counts_no_more() -> None:
    outlet = StreamWriter()
    for _ in range(10):
        outlet.token(b"x" * (MAX_HELD_BYTES + 1))
        assert len(outlet.take()) == MAX_HELD_BYTES + 1
    assert outlet.error is None


async def test_silence_is_counted_from_the_last_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    outlet, transport = StreamWriter(), FakeTransport()
    open_to(outlet, transport)
    times = iter([7.0, 11.999, 12.0, 12.0])
    monkeypatch.setattr(outlet, "_loop", SimpleNamespace(time=times.__next__))
    outlet.token(b"x")
    assert not await outlet.news(5.0)
    assert list(times) == []


def written_to(transport: FakeTransport, *, chunked: bool) -> bytes:
    """What has been written since it was collected last."""
    return unchunked(transport.written) if chunked else transport.written


@pytest.mark.parametrize("chunked", [False, True])
@settings(deadline=None, max_examples=100)
@given(steps=st.lists(st.sampled_from(["send", "big", "hold", "open", "read"]), max_size=40))
def test_whatever_happens_frames_arrive_once_and_in_order(
    steps: list[str], *, chunked: bool
) -> None:
    async def run() -> None:
        cuts: list[int] = []
        outlet, transport = StreamWriter(lambda: cuts.append(1)), FakeTransport()
        sent = received = b""

        def collect() -> bytes:
            written = written_to(transport, chunked=chunked)
            transport.written = b""
            return written

        for number, step in enumerate(steps):
            if step in {"send", "big"}:
                frame = b"%d;" % number + (b"x" * MAX_UNREAD_BYTES if step == "big" else b"")
                unread = len(sent) - len(received + written_to(transport, chunked=chunked))
                outlet.token(frame)
                if outlet.ended:
                    assert unread > MAX_HELD_BYTES
                    break
                sent += frame
            elif step == "hold":
                outlet.hold()
            elif step == "open":
                received += collect() + outlet.take()
                open_to(outlet, transport, chunked=chunked)
            else:
                transport.num_unread = 0
        received += collect() + outlet.take()
        assert sent == received or (outlet.ended and sent.startswith(received))
        assert len(cuts) == outlet.ended

    asyncio.run(run())
