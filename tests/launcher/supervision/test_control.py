"""The launcher's end of the socket: invalid events are dropped, and a router that does not read blocks nothing."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_launcher.supervision.control import Control


class Heard(list[Mapping[str, Any]]):
    """Events; `last` is set by one named `last`."""

    def __init__(self) -> None:
        super().__init__()
        self.last = asyncio.Event()

    def add(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "last":
            self.last.set()
        else:
            self.append(event)


LAST = b'\n{"event": "last"}\n'


def received(line: socket.socket) -> list[dict[str, object]]:
    with line.makefile("rb") as file:
        return [json.loads(text) for text in file if text.strip()]


def drained(reader: socket.socket) -> bytes:
    """All bytes that can be read now."""
    parts = []
    with suppress(BlockingIOError):
        while part := reader.recv(1 << 20):
            parts.append(part)
    return b"".join(parts)


async def test_messages_to_the_router() -> None:
    control = Control(lambda _: None)
    router = control.theirs.dup()
    control.restarting("shard-0: killed", planned=False)
    control.restarting("as planned", planned=True)
    control.gave_up("x" * 5000)
    control.close()
    with router:
        assert received(router) == [
            {"event": "restarting", "planned": False, "reason": "shard-0: killed"},
            {"event": "restarting", "planned": True, "reason": "as planned"},
            {"event": "gave_up", "reason": "x" * 1000},
        ]


@given(
    st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"")), max_size=5),
    st.integers(1, 20),
)
@settings(deadline=None, max_examples=60)
def test_events_are_read_despite_garbage_and_any_split(garbage: list[bytes], size: int) -> None:
    async def play() -> Heard:
        heard = Heard()
        control = Control(heard.add)
        good = b'{"event": "progress"}'
        sent = b"\n".join([good, *garbage, good]) + LAST
        for start in range(0, len(sent), size):
            control.theirs.send(sent[start : start + size])
            await asyncio.sleep(0)
        await heard.last.wait()
        control.close()
        return heard

    heard = asyncio.run(play())
    assert heard.count({"event": "progress"}) == 2
    assert len(heard) == 2


@pytest.mark.parametrize("line", [b"[" * 30000, b'"' + b"x" * 10**6 + b'"', b"\xff\xfe", b"null"])
async def test_long_deep_and_broken_lines_are_dropped(line: bytes) -> None:
    heard = Heard()
    control = Control(heard.add)
    loop = asyncio.get_running_loop()
    control.theirs.settimeout(0)
    await loop.sock_sendall(control.theirs, line + b'\n{"event": "x"}' + LAST)
    await heard.last.wait()
    assert heard == [{"event": "x"}]
    control.close()


async def test_router_that_does_not_read_blocks_nothing() -> None:
    control = Control(lambda _: None)
    # The buffer is so small that lines are cut.
    control._ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    for _ in range(100):
        control.restarting("é" * 900, planned=False)
    control.theirs.settimeout(0)
    cut = drained(control.theirs)
    assert not cut.endswith(b"\n")
    control.gave_up("end")
    lines = (cut + drained(control.theirs)).split(b"\n")
    assert json.loads(lines[-2]) == {"event": "gave_up", "reason": "end"}
    control.close()


async def test_router_that_is_gone_is_no_error() -> None:
    control = Control(lambda _: None)
    control.theirs.close()
    control.gave_up("r")
    control.close()
    control.close()
    control.gave_up("r")
