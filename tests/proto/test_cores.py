"""The cores of a process, by the quotas of containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace_proto.cores import usable_cores

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
