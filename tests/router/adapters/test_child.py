"""The fetching process gets its request whatever it does with its stdin."""

from __future__ import annotations

import asyncio
from typing import Any

import uvloop

from millrace_router.adapters.child import run_child

ROUNDS = 40
CLOSES_STDIN = ("sh", "-c", "exec <&-; echo '{}'")


def test_a_large_request_arrives_whole() -> None:
    request = {"words": ["x" * 100] * 5000}
    assert asyncio.run(run_child(request, timeout_seconds=60, command=("cat",))) == request


def test_a_process_that_closes_its_stdin_early_can_answer() -> None:
    async def answers() -> list[dict[str, Any]]:
        request = {"words": "x" * 5000}
        return [
            await run_child(request, timeout_seconds=60, command=CLOSES_STDIN)
            for _ in range(ROUNDS)
        ]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(answers()) == [{}] * ROUNDS
