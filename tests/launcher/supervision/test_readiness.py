from __future__ import annotations

import asyncio

import pytest

from millrace_launcher.supervision import readiness


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_cancellation_that_comes_with_a_refused_connection_is_not_lost(
    num_turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher awaits cancelled tasks, so a lost cancellation would block it."""
    refused: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    asked = asyncio.Event()

    async def status(_: str) -> int:
        asked.set()
        return await asyncio.shield(refused)

    monkeypatch.setattr(readiness, "_status", status)
    monkeypatch.setattr(readiness, "POLL_SECONDS", 3600)
    waiting = asyncio.create_task(readiness.router_ready("http://nowhere"))
    await asked.wait()
    refused.set_exception(ConnectionRefusedError())
    for _ in range(num_turns):
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting], timeout=60)
    assert waiting.cancelled()
