"""Router and shards never compute with more threads than there are cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace_launcher.host.threads import find_intel_openmp, plan_threads, usable_cores

INTEL = Path("/lib/libiomp5.so")


@pytest.mark.parametrize(
    ("cores", "shards", "requested", "intel", "environ", "threads"),
    [
        (2, 1, None, None, {}, 1),
        (8, 1, None, None, {}, 7),
        (8, 2, None, None, {}, 3),
        (1, 1, None, None, {}, 1),
        (4, 16, None, INTEL, {}, 1),
        (2, 1, None, INTEL, {}, 2),
        (8, 2, None, INTEL, {}, 4),
        (2, 1, 6, None, {"OMP_NUM_THREADS": "3"}, 6),
        (8, 1, None, INTEL, {"OMP_NUM_THREADS": "3"}, 3),
        (8, 1, None, INTEL, {"LD_PRELOAD": "/other.so"}, 7),
    ],
)
def test_threads(
    cores: int,
    shards: int,
    requested: int | None,
    intel: Path | None,
    environ: dict[str, str],
    threads: int,
) -> None:
    plan = plan_threads(
        cores=cores, shards=shards, requested=requested, intel_openmp=intel, environ=environ
    )
    assert plan.threads == threads
    assert {**environ, **plan.environment}["OMP_NUM_THREADS"] == str(threads)


def test_intel_runtime_sleeps_soon_and_user_variables_stay() -> None:
    plan = plan_threads(
        cores=4, shards=1, requested=None, intel_openmp=INTEL, environ={"KMP_BLOCKTIME": "200"}
    )
    assert plan.environment["LD_PRELOAD"] == str(INTEL)
    assert "KMP_BLOCKTIME" not in plan.environment
    plan = plan_threads(cores=4, shards=1, requested=None, intel_openmp=INTEL, environ={})
    assert plan.environment["KMP_BLOCKTIME"] == "1"
    assert plan.environment["THP_MEM_ALLOC_ENABLE"] == "1"


def test_nothing_is_preloaded_without_the_runtime_or_over_the_users_own() -> None:
    for intel, environ in ((None, {}), (INTEL, {"LD_PRELOAD": "/other.so"})):
        plan = plan_threads(cores=4, shards=1, requested=None, intel_openmp=intel, environ=environ)
        assert not {"LD_PRELOAD", "KMP_BLOCKTIME"} & plan.environment.keys()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_intel_runtime_is_found_where_a_virtual_environment_has_it(
    machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setattr("sys.path", [str(tmp_path / "lib" / "python3.12" / "site-packages")])
    assert find_intel_openmp() is None
    (tmp_path / "lib").mkdir()
    library = tmp_path / "lib" / "libiomp5.so"
    library.touch()
    assert find_intel_openmp() == (library if machine == "x86_64" else None)


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
