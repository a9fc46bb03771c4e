"""What the machine reports, from files as Linux writes them."""

from __future__ import annotations

from pathlib import Path

from millrace_shard.resources import available_memory, usable_cores

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


def test_version_1_control_groups(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("4000000\n")
    (folder / "memory.usage_in_bytes").write_text("1000000\n")
    (folder / "memory.stat").write_text("cache 9\ntotal_inactive_file 200000\n")
    assert available_memory(meminfo=meminfo(tmp_path), cgroup=tmp_path) == 3_200_000


def test_without_meminfo_physical_memory_counts(tmp_path: Path) -> None:
    assert available_memory(meminfo=tmp_path / "none", cgroup=tmp_path) > 2**20


def test_cores_respect_the_quota(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    everything = usable_cores(quota=quota)
    quota.write_text("max 100000\n")
    assert usable_cores(quota=quota) == everything
    quota.write_text("150000 100000\n")
    assert usable_cores(quota=quota) == 1
    quota.write_text("50000 100000\n")
    assert usable_cores(quota=quota) == 1
