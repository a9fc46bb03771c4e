"""The router's own time for a request and for an answer."""

from __future__ import annotations

import pytest

from millrace_router.prediction.cost import RouterOverhead


def test_one_slow_answer_moves_little() -> None:
    overhead = RouterOverhead()
    assert overhead.turn_seconds == 0.0
    for _ in range(1000):
        overhead.add_answer(0.001)
    overhead.add_answer(0.065)
    assert overhead.turn_seconds == pytest.approx(0.002, rel=0.01)


def test_a_burst_of_entries_is_soon_forgotten() -> None:
    overhead = RouterOverhead()
    assert overhead.entry_seconds == 0.0
    for seconds in [*([0.5] * 200), *([0.001] * 40)]:
        overhead.add_entry(seconds)
    assert overhead.entry_seconds == 0.001
