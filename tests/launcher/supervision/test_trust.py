"""A restart keeps what the processes before it cannot have damaged, and frees memory after an OOM kill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV, SIGTERM

import pytest

from millrace_launcher.supervision.trust import (
    NOTHING,
    Distrust,
    Kept,
    available_bytes,
    kept_after,
    oom_kills,
)

ALL, WEIGHTS = Kept(weights=True, kv=True), Kept(weights=True, kv=False)


@pytest.mark.parametrize(
    ("codes", "restarts", "searches", "num_oom", "is_oom", "kept"),
    [
        pytest.param([-SIGKILL], 1, 0, 0, False, ALL, id="a first kill from outside"),
        pytest.param([75], 0, 0, 0, False, ALL, id="a rank that meets the others anew"),
        pytest.param([-SIGKILL, 75], 1, 0, 0, False, ALL, id="both"),
        pytest.param([-SIGKILL], 1, 0, 1, True, WEIGHTS, id="an OOM kill"),
        pytest.param([-SIGKILL], 1, 0, 2, True, NOTHING, id="a second OOM kill"),
        pytest.param([-SIGKILL, -SIGSEGV], 1, 0, 0, False, WEIGHTS, id="one rank crashed"),
        *(
            pytest.param([-number], 1, 0, 0, False, WEIGHTS, id=number.name)
            for number in (SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGTERM)
        ),
        *(pytest.param([code], 1, 0, 0, False, WEIGHTS, id=f"exit {code}") for code in (0, 1, 9)),
        pytest.param([], 1, 0, 0, False, WEIGHTS, id="a hang, or a failed step"),
        pytest.param([-SIGKILL], 2, 0, 0, False, WEIGHTS, id="a second death without progress"),
        pytest.param([-SIGKILL], 1, 1, 0, False, WEIGHTS, id="a death while poison is searched"),
        pytest.param([-SIGKILL], 0, 1, 0, False, ALL, id="a first death among suspects"),
        pytest.param([-SIGKILL], 3, 0, 0, False, NOTHING, id="a third death without progress"),
        pytest.param([-SIGSEGV], 0, 6, 0, False, WEIGHTS, id="a long search"),
    ],
)
def test_what_ended_decides_what_is_kept(
    codes: list[int], restarts: int, searches: int, num_oom: int, is_oom: bool, kept: Kept
) -> None:
    assert (
        kept_after(codes, restarts=restarts, searches=searches, num_oom=num_oom, is_oom=is_oom)
        == kept
    )


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 3 << 30), (str(2 << 30), 1 << 30), (str(1 << 29), 0)]
)
def test_a_second_model_may_take_what_the_machine_and_the_cgroup_leave(
    tmp_path: Path, limit: str, expected: int
) -> None:
    cgroup, meminfo, group = tmp_path / "cgroup", tmp_path / "meminfo", tmp_path / "groups/service"
    group.mkdir(parents=True)
    cgroup.write_text("0::/service\n")
    meminfo.write_text(f"MemTotal: 9 kB\nMemAvailable:   {3 << 20} kB\n")
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{3 << 29}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {1 << 29}\n")
    read = {"cgroup": cgroup, "cgroups": tmp_path / "groups", "meminfo": meminfo}
    assert available_bytes(**read) == expected


def test_room_is_unknown_without_the_kernels_files(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert available_bytes(cgroup=nowhere, cgroups=nowhere, meminfo=nowhere) is None


class Counters:
    """The files of a kernel."""

    def __init__(self, folder: Path) -> None:
        self.cgroup, self.vmstat = folder / "cgroup", folder / "vmstat"
        self.events = folder / "groups/service/memory.events"
        self.events.parent.mkdir(parents=True)
        self.cgroup.write_text("4:memory:/other\n0::/service\n")
        self.vmstat.write_text("nr_free_pages 5\noom_kill 40\n")
        self.groups = folder / "groups"

    def read(self) -> int | None:
        return oom_kills(cgroup=self.cgroup, cgroups=self.groups, vmstat=self.vmstat)


@pytest.fixture
def counters(tmp_path: Path) -> Counters:
    return Counters(tmp_path)


def test_oom_kills_are_those_of_the_cgroup_or_else_of_the_machine(counters: Counters) -> None:
    counters.events.write_text("low 0\nhigh 2\nmax 9\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert counters.read() == 2
    counters.events.unlink()
    assert counters.read() == 40
    counters.cgroup.unlink()
    assert counters.read() == 40
    counters.vmstat.write_text("nr_free_pages 5\n")
    assert counters.read() is None


def test_a_kill_is_an_oom_kill_if_the_counter_has_grown(counters: Counters) -> None:
    counters.events.write_text("oom_kill 0\n")
    distrust = Distrust(counters.read)
    assert distrust.after([-SIGKILL], restarts=1) == ALL
    counters.events.write_text("oom_kill 1\n")
    assert distrust.after([-SIGKILL], restarts=1) == WEIGHTS
    counters.events.write_text("oom_kill 2\n")
    assert distrust.after([-SIGKILL], restarts=1) == NOTHING


def test_a_kill_after_progress_ends_the_count_of_oom_kills(counters: Counters) -> None:
    counters.events.write_text("oom_kill 0\n")
    distrust = Distrust(counters.read)
    for number, kept in ((1, WEIGHTS), (2, NOTHING)):
        counters.events.write_text(f"oom_kill {number}\n")
        assert distrust.after([-SIGKILL], restarts=number) == kept
    assert distrust.after([75], restarts=2) == NOTHING
    assert distrust.after([-SIGKILL], restarts=1, searches=1) == NOTHING
    assert distrust.after([-SIGKILL], restarts=1) == ALL
    counters.events.write_text("oom_kill 3\n")
    assert distrust.after([-SIGKILL], restarts=1) == WEIGHTS


def test_an_oom_kill_before_a_start_serves_blames_no_later_kill(counters: Counters) -> None:
    counters.events.write_text("oom_kill 0\n")
    distrust = Distrust(counters.read)
    counters.events.write_text("oom_kill 1\n")
    distrust.ready()
    assert distrust.after([-SIGKILL], restarts=1) == ALL


def test_an_oom_kill_of_another_process_blames_no_crash(counters: Counters) -> None:
    counters.events.write_text("oom_kill 0\n")
    distrust = Distrust(counters.read)
    for number in (1, 2, 3):
        counters.events.write_text(f"oom_kill {number}\n")
        assert distrust.after([-SIGSEGV], restarts=1) == WEIGHTS


def test_an_oom_kill_of_another_rank_frees_the_kv_of_this_one(counters: Counters) -> None:
    counters.events.write_text("oom_kill 0\n")
    distrust = Distrust(counters.read)
    for number in (1, 2, 3):
        counters.events.write_text(f"oom_kill {number}\n")
        assert distrust.after([75], restarts=0) == WEIGHTS
    assert distrust.after([75], restarts=0) == ALL


def test_uncounted_kills_keep_no_kv() -> None:
    unknown: Callable[[], int | None] = lambda: None  # noqa: E731
    distrust = Distrust(unknown)
    for _ in range(3):
        assert distrust.after([-SIGKILL], restarts=1) == WEIGHTS
