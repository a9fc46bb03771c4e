"""Reading the profiler's trace."""

from __future__ import annotations

from typing import Any

import pytest
from bench.profile.__main__ import events_of, label


def call(
    name: str, category: str = "cpu_op", *, thread: int = 1, sizes: Any = ()
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "tid": thread,
        "ts": 1.0,
        "dur": 2.0,
        "args": {"Input Dims": sizes},
    }


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (call("aten::mm", sizes=[[2, 3], [3, 4]]), "aten::mm"),
        (
            call("millrace::linear", sizes=[[], [32, 576], [7], [960, 576], [1, 1]]),
            "millrace::linear 32x576, 960x576",
        ),
        (call("millrace::open"), "millrace::open"),
        (
            call("/a/b/shard/decoder.py(12): forward", "python_function"),
            "shard/decoder.py(12): forward",
        ),
        (call("<built-in method empty>", "python_function"), "<built-in method empty>"),
    ],
)
def test_names(event: dict[str, Any], text: str) -> None:
    assert label(event) == text


def test_only_the_calls_of_the_busiest_thread_count() -> None:
    trace = [
        call("a"),
        call("b", thread=2),
        call("c"),
        call("d", "ac2g"),
        {"ph": "M", "name": "process_name"},
    ]
    events = events_of(trace)
    assert [event.name for event in events] == ["a", "c"]
    assert all(event.is_operator for event in events)
