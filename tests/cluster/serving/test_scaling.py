"""The number of replicas by predicted wait and KV use."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from millrace_ray.serving.scaling import USED, WAIT, WaitPolicy, wanted


@pytest.mark.parametrize(
    ("replicas", "waits", "used", "expected"),
    [
        (1, [0.0], [0.2], 1),
        (2, [1.0, 1.0], [0.9, 0.9], 2),
        # Half as long again as it may be: half as many replicas again.
        (2, [3.0, 3.0], [0.9, 0.9], 3),
        (4, [0.0, 0.0, 8.0, 4.0], [0.9] * 4, 6),
        # Never more than twice as many at once.
        (1, [40.0], [1.0], 2),
        # The two others hold what three hold.
        (3, [0.0] * 3, [0.4, 0.5, 0.5], 2),
        (3, [0.0] * 3, [0.5, 0.5, 0.5], 3),
        # Nobody waits for long, yet somebody waits.
        (3, [0.5] * 3, [0.1] * 3, 3),
    ],
)
def test_replicas_follow_the_wait(
    replicas: int, waits: list[float], used: list[float], expected: int
) -> None:
    assert wanted(replicas, waits, used, 2.0) == expected


@dataclass
class Figure:
    value: float


@dataclass
class Seen:
    current_num_replicas: int
    target_num_replicas: int
    raw_metrics: dict[str, dict[str, list[Figure]]] = field(default_factory=dict)


def test_nothing_is_decided_while_replicas_start_or_tell_nothing() -> None:
    policy = WaitPolicy(target_wait_seconds=1.0)
    busy = {WAIT: {"a": [Figure(0.0), Figure(9.0)]}, USED: {"a": [Figure(1.0)]}}
    assert policy(Seen(1, 1, busy)) == (2, {})
    assert policy(Seen(1, 3, busy)) == (3, {})
    assert policy(Seen(2, 2, busy)) == (2, {})
    assert policy(Seen(2, 2)) == (2, {})
