"""The times of signals to shards: random for each run, and each recovery measurable."""

from __future__ import annotations

import signal
from itertools import pairwise

import pytest
from bench.faults.kills.kills import table
from bench.faults.kills.signals import PlannedSignal, SentSignal, schedule
from bench.faults.members import role_of


def signals(count: int, seed: str = "a") -> list[PlannedSignal]:
    return schedule(count, num_tokens=100_000, rank=1, number=signal.SIGKILL, seed=seed)


@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_signals_come_in_order_within_the_run(count: int) -> None:
    for seed in "abcdefgh":
        found = signals(count, seed)
        assert len(found) == count
        assert [b.after_tokens for b in found] == sorted(b.after_tokens for b in found)
        assert found[0].after_tokens > 0
        assert found[-1].after_tokens <= 90_000
        assert all(b.rank == 1 and b.number == signal.SIGKILL for b in found)


def test_one_signal_of_ten_is_sent_in_the_recovery_from_the_one_before() -> None:
    for seed in "abcdefgh":
        found = signals(10, seed)
        (place,) = (place for place, planned in enumerate(found) if planned.in_recovery)
        assert place > 0
        assert found[place].after_tokens == found[place - 1].after_tokens


def test_others_are_far_enough_apart_to_be_measured() -> None:
    for seed in "abcdefgh":
        places = [planned.after_tokens for planned in signals(10, seed) if not planned.in_recovery]
        assert min(b - a for a, b in pairwise(places)) >= 0.4 * 88_000 / 9


def test_a_seed_decides() -> None:
    assert signals(10, "a") == signals(10, "a")
    assert signals(10, "a") != signals(10, "b")


def test_a_table_shows_what_is_known() -> None:
    one, two = (SentSignal(planned, at=1.0, pid=7, num_tokens=5) for planned in signals(2))
    one.first_token, one.all_moving, one.parts = 2.0, 3.0, {"imports": 1.5}
    lines = [" ".join(line.split()) for line in table([one, two]).splitlines()]
    assert len(lines) == 5
    assert "2.00 s | 3.00 s" in lines[2]
    assert "1.50 s" in lines[2]
    assert " s" not in lines[3]
    assert "2.00 s | 3.00 s" in lines[4]


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("python -m millrace_launcher --port=1", "launcher"),
        ("python tests/support/millrace_shard_launcher.py poison.py --port=1", "launcher"),
        (
            "python -m millrace_launcher.processes.child 7 /bin/python -m millrace_router --port=1",
            "router",
        ),
        ("python -m millrace_shard serve --uds-path=/tmp/x /model", "shard-0"),
        ("python /x/millrace_poison_shard.py serve --uds-path=/tmp/x --rank=1 /model", "shard-1"),
        ("python -m millrace_shard download-weights demo", None),
        ("python -m millrace_launcher.processes.guard /tmp/x-0", None),
        ("", None),
    ],
)
def test_processes_are_known_by_their_command_lines(command: str, role: str | None) -> None:
    assert role_of(command.split()) == role
