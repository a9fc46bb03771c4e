"""Frames reach the transport at once, or wait in order; nothing is lost or sent twice."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_fakes_sse import unchunked
from millrace_router.outlet import MAX_UNREAD_BYTES, Outlet


class FakeTransport:
    """Remembers what was written; the test says what the client has read."""

    def __init__(self) -> None:
        self.written = b""
        self.num_unread = 0
        self.closing = False

    def write(self, data: bytes) -> None:
        assert not self.closing
        self.written += data
        self.num_unread += len(data)

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return self.num_unread


def open_to(outlet: Outlet, transport: FakeTransport, *, chunked: bool = False) -> None:
    outlet.open(cast("asyncio.Transport", transport), chunked=chunked)


async def test_frames_are_chunks_of_http_1_1() -> None:
    outlet, transport = Outlet(), FakeTransport()
    open_to(outlet, transport, chunked=True)
    outlet.send(b"data: 1\n\n")
    outlet.send(b"x" * 300)
    assert transport.written == b"9\r\ndata: 1\n\n\r\n12c\r\n" + b"x" * 300 + b"\r\n"


async def test_a_full_buffer_closes_it_until_it_is_opened_again() -> None:
    outlet, transport = Outlet(), FakeTransport()
    open_to(outlet, transport)
    big = b"x" * (MAX_UNREAD_BYTES + 1)
    outlet.send(big)
    assert await outlet.news(60.0)
    outlet.send(b"later")
    assert transport.written == big
    outlet.hold()
    assert outlet.take() == b"later"
    transport.num_unread = 0
    open_to(outlet, transport)
    outlet.send(b"again")
    assert transport.written == big + b"again"


async def test_a_connection_that_closes_is_the_end() -> None:
    outlet, transport = Outlet(), FakeTransport()
    open_to(outlet, transport)
    transport.closing = True
    outlet.send(b"x")
    assert await outlet.news(60.0)
    assert isinstance(outlet.error, ConnectionResetError)


async def test_the_first_end_counts_and_nothing_follows_it() -> None:
    outlet = Outlet()
    outlet.send(b"a")
    outlet.end()
    outlet.send(b"b")
    outlet.fail(ValueError("late"))
    assert (outlet.take(), outlet.error, outlet.ended) == (b"a", None, True)


async def test_silence_is_counted_from_the_last_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    outlet, transport = Outlet(), FakeTransport()
    open_to(outlet, transport)
    times = iter([7.0, 11.999, 12.0, 12.0])
    monkeypatch.setattr(outlet, "_loop", SimpleNamespace(time=times.__next__))
    outlet.send(b"x")
    assert not await outlet.news(5.0)
    assert list(times) == []


@pytest.mark.parametrize("chunked", [False, True])
@settings(deadline=None, max_examples=100)
@given(steps=st.lists(st.sampled_from(["send", "big", "hold", "open", "read"]), max_size=40))
def test_whatever_happens_frames_arrive_once_and_in_order(
    steps: list[str], *, chunked: bool
) -> None:
    async def run() -> None:
        outlet, transport = Outlet(), FakeTransport()
        sent = received = b""

        def collect() -> bytes:
            written, transport.written = transport.written, b""
            return unchunked(written) if chunked else written

        for number, step in enumerate(steps):
            if step in {"send", "big"}:
                frame = b"%d;" % number + (b"x" * MAX_UNREAD_BYTES if step == "big" else b"")
                outlet.send(frame)
                sent += frame
            elif step == "hold":
                outlet.hold()
            elif step == "open":
                received += collect() + outlet.take()
                open_to(outlet, transport, chunked=chunked)
            else:
                transport.num_unread = 0
        assert received + collect() + outlet.take() == sent

    asyncio.run(run())
