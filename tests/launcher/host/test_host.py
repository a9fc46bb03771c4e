"""Claims of ports and sockets, threads, devices and the runtime of one host."""

from __future__ import annotations

import fcntl
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator
from getpass import getuser
from pathlib import Path

import pytest

from millrace_launcher.config import HostVariables
from millrace_launcher.errors import ArgumentValidation, LaunchError, NotEnoughCUDADevices
from millrace_launcher.host import claims
from millrace_launcher.host.claims import (
    claimed_address,
    claimed_port,
    claimed_sockets,
    socket_paths,
    socket_prefix,
)
from millrace_launcher.host.devices import shard_count, visible_devices
from millrace_launcher.host.leftovers import clear_socket, remove_registration
from millrace_launcher.host.runtime import runtime_info
from millrace_launcher.host.threads import find_intel_openmp, plan_threads
from millrace_testing.launcher.deployment import kept_port

HOLDER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(fd, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, holding the lock of `{tmp_path}/s`."""
    command = [sys.executable, "-c", HOLDER, f"{tmp_path}/s.lock"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_sockets_are_in_the_runtime_folder_that_outlives_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "LONGEST_FOLDER_BYTES", len(f"{tmp_path}/service"))
    service, session, lingering = (tmp_path / name for name in ("service", "session", "linger"))
    for folder in (service, session, lingering):
        folder.mkdir()

    def prefix(**variables: str) -> str:
        return socket_prefix(HostVariables.model_validate(variables), "/tmp/x", lingering=lingering)

    assert prefix() == "/tmp/x"
    assert prefix(runtime_directory=f"{service}:/run/other") == f"{service}/x"
    # Removed at the end of the session.
    assert prefix(xdg_runtime_dir=str(session)) == "/tmp/x"
    (lingering / getuser()).touch()
    assert prefix(xdg_runtime_dir=str(session)) == f"{session}/x"
    both = prefix(xdg_runtime_dir=str(session), runtime_directory=str(service))
    assert both == f"{service}/x"
    assert prefix(runtime_directory=str(tmp_path / "gone")) == "/tmp/x"
    long = tmp_path / ("long" * 20)
    long.mkdir()
    assert prefix(runtime_directory=str(long)) == "/tmp/x"


def test_a_claim_is_exclusive_and_leaves_nothing(tmp_path: Path) -> None:
    prefix = f"{tmp_path}/s"
    with claimed_sockets(prefix, num_shard=1, may_move=False) as mine:
        assert mine == prefix
        with (
            pytest.raises(
                ArgumentValidation, match=f"another server uses {prefix}.*--shard-uds-path"
            ),
            claimed_sockets(prefix, num_shard=1, may_move=False),
        ):
            pass
    assert list(tmp_path.iterdir()) == []
    with claimed_sockets(prefix, num_shard=1, may_move=False):
        pass


def test_kill_9_releases_the_claim(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    prefix = f"{tmp_path}/s"
    with pytest.raises(ArgumentValidation), claimed_sockets(prefix, num_shard=1, may_move=False):
        pass
    other.kill()
    other.wait()
    assert Path(f"{prefix}.lock").exists()
    with claimed_sockets(prefix, num_shard=1, may_move=False):
        pass


@pytest.mark.usefixtures("other")
def test_default_path_moves_to_a_private_folder(tmp_path: Path) -> None:
    with (
        claimed_sockets(f"{tmp_path}/s", num_shard=2, may_move=True) as first,
        claimed_sockets(f"{tmp_path}/s", num_shard=2, may_move=True) as second,
    ):
        folders = {Path(first).parent, Path(second).parent}
        assert len(folders) == 2
        assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
    assert [path.name for path in tmp_path.iterdir()] == ["s.lock"]


def test_dead_sockets_of_every_rank_are_removed_and_live_ones_kept(tmp_path: Path) -> None:
    paths = socket_paths(f"{tmp_path}/s", 3)
    with socket.socket(socket.AF_UNIX) as live:
        for path in paths[:2]:
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(path))
        live.bind(str(paths[2]))
        live.listen()
        with claimed_sockets(f"{tmp_path}/s", num_shard=2, may_move=False):
            assert [path.exists() for path in paths] == [False, False, True]
        with claimed_sockets(f"{tmp_path}/s", num_shard=3, may_move=True) as moved:
            assert moved != f"{tmp_path}/s"
        assert paths[2].is_socket()


def test_a_lock_that_is_no_file_of_ours_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (tmp_path / "s.lock").symlink_to(target)
    with (
        pytest.raises(ArgumentValidation, match="cannot be opened"),
        claimed_sockets(f"{tmp_path}/s", num_shard=1, may_move=False),
    ):
        pass
    assert not target.exists()


def test_a_port_in_use_is_skipped_if_it_may_be(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with claimed_port(port, may_move=False, locks=tmp_path) as kept:
            assert kept == port
        with claimed_port(port, may_move=True, locks=tmp_path) as moved:
            assert moved != port
    with claimed_port(moved, may_move=True, locks=tmp_path) as free:
        assert free == moved
    assert list(tmp_path.iterdir()) == []


def test_a_free_port_is_claimed_once(tmp_path: Path) -> None:
    with (
        kept_port() as port,
        claimed_port(port, may_move=True, locks=tmp_path) as first,
        claimed_port(port, may_move=True, locks=tmp_path) as second,
    ):
        assert first == port
        assert second != port


def test_a_lock_file_removed_between_opening_and_locking_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "s.lock"
    locked: list[int] = []
    real = fcntl.flock

    def flock(descriptor: int, how: int) -> None:
        locked.append(descriptor)
        if len(locked) == 1:
            lock.unlink()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with claimed_sockets(f"{tmp_path}/s", num_shard=1, may_move=False):
        assert len(locked) == 2
        assert lock.exists()


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
def test_threads_are_planned_from_cores_shards_and_environment(
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


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_intel_runtime_of_a_virtual_environment_is_detected(
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


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": "0,1"}, 1),
        ({"NVIDIA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, 5),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, 5),
        ({"ZE_AFFINITY_MASK": "0,1"}, 2),
    ],
)
def test_visible_devices_follow_the_environment(
    environ: dict[str, str], expected: int | None
) -> None:
    variables = HostVariables.model_construct(None, **{k.lower(): v for k, v in environ.items()})
    assert visible_devices(variables, query=lambda _: ["gpu"] * 5) == expected


@pytest.mark.parametrize(
    ("sharded", "num_shard", "visible", "expected"),
    [
        (True, None, 4, 4),
        (True, 3, 1, 3),
        (False, None, 8, 1),
        (False, 5, 8, 5),
        (None, None, 6, 6),
        (None, None, None, 1),
        (None, None, 0, 1),
        (None, 2, None, 2),
    ],
)
def test_the_shard_count_follows_flags_and_visible_devices(
    sharded: bool | None, num_shard: int | None, visible: int | None, expected: int
) -> None:
    assert shard_count(sharded=sharded, num_shard=num_shard, visible=visible) == expected


@pytest.mark.parametrize(
    ("sharded", "num_shard", "visible", "error", "message"),
    [
        (True, None, None, NotEnoughCUDADevices, "`sharded` is true but only found 0 CUDA devices"),
        (True, None, 1, NotEnoughCUDADevices, "`sharded` is true but only found 1 CUDA devices"),
        (True, 1, 4, ArgumentValidation, "`sharded` is true but `num_shard` <= 1"),
        (None, 0, 4, ArgumentValidation, "`num_shard` cannot be < 1"),
        (False, 0, 4, ArgumentValidation, "`num_shard` cannot be < 1"),
    ],
)
def test_impossible_shard_counts_are_refused(
    sharded: bool | None,
    num_shard: int | None,
    visible: int | None,
    error: type[LaunchError],
    message: str,
) -> None:
    with pytest.raises(error) as raised:
        shard_count(sharded=sharded, num_shard=num_shard, visible=visible)
    assert (str(raised.value), raised.value.variant) == (message, error.__name__)


def test_other_files_stay(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(ArgumentValidation, match="is not a socket"):
        clear_socket(path)
    assert path.read_text() == "precious"


def test_a_busy_port_is_refused() -> None:
    with kept_port() as port:
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
            with pytest.raises(ArgumentValidation, match=f"cannot listen on 127.0.0.1 port {port}"):
                claimed_address("127.0.0.1", port)
        claimed_address("127.0.0.1", port).close()


def test_a_bug_report_has_versions_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("DOCKER_LABEL", "sha-1"),
        ("VERGEN_GIT_SHA", "abc"),
        ("HF_TOKEN", "secret"),
    ):
        monkeypatch.setenv(name, value)
    text = runtime_info(HostVariables())
    assert f"Python version: {platform.python_version()}" in text
    assert "Commit sha: abc" in text
    assert "Docker label: sha-1" in text
    assert "torch: " in text
    assert "nvidia-smi: " in text
    assert "secret" not in text


def test_only_registrations_of_the_killed_process_are_removed(tmp_path: Path) -> None:
    names = ["__KMP_REGISTERED_LIB_12_0", "__KMP_REGISTERED_LIB_123_0", "torch_12", "sem.12"]
    for name in names:
        (tmp_path / name).touch()
    remove_registration(12, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])
    remove_registration(12, tmp_path / "missing")
