"""Lines of progress, by a clock that the test turns."""

from __future__ import annotations

import logging
from itertools import chain, repeat

import pytest

from millrace_shard.weights.read_ahead import LoadProgress, readable_size

GB = 10**9


def told(caplog: pytest.LogCaptureFixture, *times: float) -> list[str]:
    """Log messages for a checkpoint of 16 GB, read 4 GB at a time; reading begins at the first of `times`."""
    clock = chain(times, repeat(times[-1]))
    progress = LoadProgress(16 * GB, lambda: next(clock))
    with caplog.at_level(logging.INFO):
        for _ in times[1:]:
            progress.add(4 * GB)
    return [record.message for record in caplog.records]


def test_progress_is_logged_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    expected = ["loaded 8.0 GB of 16.0 GB", "loaded 16.0 GB of 16.0 GB"]
    assert told(caplog, 100.0, 103.0, 106.0, 109.0, 112.0) == expected


def test_a_fast_load_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, 100.0, 101.0, 101.5, 102.0, 102.0) == []


def test_sizes_have_a_unit_that_shows_them() -> None:
    assert readable_size(7_300_000) == "7 MB"
    assert readable_size(999_400_000) == "999 MB"
    assert readable_size(1_000_000_000) == "1.0 GB"
    assert readable_size(16_060_000_000) == "16.1 GB"
