"""Memory and cores, read from files as Linux writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace_shard.device.resources import available_memory, usable_cores

MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\n"


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".", 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def meminfo(folder: Path) -> Path:
    path = folder / "meminfo"
    path.write_text(MEMINFO)
    return path


def test_without_a_container_the_kernels_word_counts(tmp_path: Path) -> None:
    found = available_memory(meminfo=meminfo(tmp_path), cgroup=tmp_path / "none")
    assert found == 8_000_000 * 1024


def test_a_containers_limit_counts_when_it_is_nearer(tmp_path: Path) -> None:
    group = write(
        tmp_path,
        memory_max="4000000\n",
        memory_current="3000000\n",
        memory_stat="inactive_file 500000\n",
    )
    assert available_memory(meminfo=meminfo(tmp_path), cgroup=group) == 1_500_000
    write(tmp_path, memory_max="max\n")
    assert available_memory(meminfo=meminfo(tmp_path), cgroup=group) == 8_000_000 * 1024


def test_version_1_control_groups_limit_the_memory(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("4000000\n")
    (folder / "memory.usage_in_bytes").write_text("1000000\n")
    (folder / "memory.stat").write_text("cache 9\ntotal_inactive_file 200000\n")
    assert available_memory(meminfo=meminfo(tmp_path), cgroup=tmp_path) == 3_200_000


def test_without_meminfo_physical_memory_counts(tmp_path: Path) -> None:
    assert available_memory(meminfo=tmp_path / "none", cgroup=tmp_path) > 2**20


VERSION_2 = [
    ({"cpu.max": "max 100000\n"}, 8),
    ({"cpu.max": "350000 100000\n"}, 3),
    ({"cpu.max": "50000 100000\n"}, 1),
    ({"cpu.max": "1600000 100000\n"}, 8),
]
VERSION_1 = [
    ({"cpu/cpu.cfs_quota_us": f"{quota}\n", "cpu/cpu.cfs_period_us": "50000\n"}, cores)
    for quota, cores in ((-1, 8), (175000, 3), (25000, 1), (800000, 8))
]


@pytest.mark.parametrize(("files", "cores"), [({}, 8), *VERSION_2, *VERSION_1])
def test_cores_respect_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(cgroup=tmp_path) == cores
