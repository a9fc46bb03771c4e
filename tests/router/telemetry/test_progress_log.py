"""The log lines of requests that run for minutes."""

from __future__ import annotations

import asyncio

import pytest
from structlog.contextvars import bound_contextvars, merge_contextvars
from structlog.testing import capture_logs

from millrace_router.telemetry import progress_log
from millrace_router.telemetry.progress_log import ProgressLog


async def test_every_minute_has_a_line_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_log, "INTERVAL_SECONDS", 0.0)
    written: list[int] = []
    third = asyncio.Event()

    def generated() -> int:
        written.append(7 * len(written))
        if len(written) == 3:
            third.set()
        return written[-1]

    with capture_logs(processors=[merge_contextvars]) as lines:
        with bound_contextvars(request_id="abc"):
            progress = ProgressLog(100, generated)
        await third.wait()
        progress.close()
        count = len(lines)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(lines) == count == 3
    assert [line["minutes"] for line in lines] == [1, 2, 3]
    assert [line["generated_tokens"] for line in lines] == [0, 7, 14]
    assert {(line["request_id"], line["max_new_tokens"]) for line in lines} == {("abc", 100)}
