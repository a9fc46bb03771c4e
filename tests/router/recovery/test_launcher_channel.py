"""The router's end of the channel to the launcher."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.recovery.launcher_channel import LauncherChannel


@dataclass
class Line:
    """Both ends, and the messages that the router's end received."""

    launcher: socket.socket
    channel: LauncherChannel
    heard: list[tuple[object, ...]] = field(default_factory=list)


@pytest.fixture
def line() -> Iterator[Line]:
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    line = Line(ours, LauncherChannel(theirs.detach()))
    line.channel.on_restarting = lambda *said: line.heard.append(said)
    line.channel.on_gave_up = lambda *said: line.heard.append(said)
    with ours:
        yield line


def drained(reader: socket.socket) -> bytes:
    """All data that can be read now."""
    parts = []
    with suppress(BlockingIOError):
        while part := reader.recv(1 << 20):
            parts.append(part)
    return b"".join(parts)


async def test_the_channel_carries_messages_both_ways(line: Line) -> None:
    launcher, channel, heard = line.launcher, line.channel, line.heard
    assert channel._socket is not None
    running = asyncio.create_task(channel.run())
    waiting = asyncio.create_task(channel.shards_ready())
    channel.listening()
    channel.report_progress()
    channel.restart_shards("hung")
    channel.report_suspects(7)
    await asyncio.sleep(0)
    assert not waiting.done()
    launcher.sendall(
        b'{"event": "ready", "life": 3}\n{"event": "ready", "life": null}\n{"event": "ready"}\n'
        b'{"event": "restarting", "planned": true, "reason": "a"}\n'
        b'{"event": "restarting", "planned": false, "reason": "b"}\n'
        b'{"event": "gave_up", "reason": "c"}\n'
    )
    launcher.shutdown(socket.SHUT_WR)
    await running
    await waiting
    assert heard == [(True, "a"), (False, "b"), ("c",)]
    assert channel.life == 3
    with launcher.makefile("r") as lines:
        assert [json.loads(said) for said in lines] == [
            {"event": "listening"},
            {"event": "progress"},
            {"event": "restart", "reason": "hung"},
            {"event": "suspects", "count": 7},
        ]
    channel.report_progress()


async def test_without_a_launcher_messages_are_dropped() -> None:
    channel = LauncherChannel(None)
    assert channel._socket is None
    await channel.run()
    await channel.shards_ready()
    channel.report_progress()
    channel.restart_shards("r")
    channel.report_suspects(1)


def test_descriptor_that_is_no_socket_is_no_launcher() -> None:
    ours, theirs = os.pipe()
    assert LauncherChannel(theirs)._socket is None
    os.close(ours)
    os.close(theirs)


@given(st.lists(st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"")), max_size=5))
@settings(deadline=None, max_examples=60)
def test_garbage_is_dropped(garbage: list[bytes]) -> None:
    async def play() -> list[str]:
        ours, theirs = socket.socketpair()
        channel = LauncherChannel(theirs.detach())
        heard: list[str] = []
        channel.on_gave_up = heard.append
        good = b'{"event": "gave_up", "reason": "r"}'
        with ours:
            ours.sendall(b"\n".join([good, *garbage, good, b""]))
        await channel.run()
        return heard

    assert asyncio.run(play()) == ["r", "r"]


@pytest.mark.parametrize(
    "sent",
    [
        b"[" * 30000,
        b"7",
        b'{"event": "gave_up"}',
        b'{"event": "gave_up", "reason": 1}',
        b'{"event": "restarting", "planned": 1, "reason": "r"}',
        b'{"event": "unknown"}',
    ],
)
async def test_unknown_messages_of_the_launcher_are_dropped(line: Line, sent: bytes) -> None:
    launcher, channel, heard = line.launcher, line.channel, line.heard
    launcher.sendall(sent + b'\n{"event": "gave_up", "reason": "end"}\n')
    launcher.shutdown(socket.SHUT_WR)
    await channel.run()
    assert heard == [("end",)]


async def test_a_launcher_that_does_not_read_delays_nothing(line: Line) -> None:
    launcher, channel = line.launcher, line.channel
    assert channel._socket is not None
    # A small buffer, so that lines are sent in part.
    channel._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    for _ in range(100):
        channel.restart_shards("é" * 900)
    launcher.settimeout(0)
    cut = drained(launcher)
    assert not cut.endswith(b"\n")
    channel.report_suspects(3)
    lines = (cut + drained(launcher)).split(b"\n")
    assert json.loads(lines[-2]) == {"event": "suspects", "count": 3}
    launcher.shutdown(socket.SHUT_RDWR)
    await channel.run()


async def test_end_of_the_router_closes_the_line(line: Line) -> None:
    launcher, channel = line.launcher, line.channel
    running = asyncio.create_task(channel.run())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert channel._socket is None
    assert launcher.recv(1) == b""
