"""Two deployments of one host never share sockets or a meeting port."""

from __future__ import annotations

import fcntl
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace_launcher.errors import ArgumentValidation
from millrace_launcher.host.claims import claimed_port, claimed_sockets, socket_paths
from millrace_testing.launcher.ports import kept_port

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


def test_kill_9_lets_go(tmp_path: Path, other: subprocess.Popen[str]) -> None:
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


def test_dead_sockets_of_every_rank_are_cleared_and_live_ones_left_alone(tmp_path: Path) -> None:
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
