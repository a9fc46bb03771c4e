"""Ownership of sockets in a folder."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from millrace_shard.server.address import SocketFile, SocketTaken, for_this_user_only


@contextmanager
def listening(path: Path) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        yield


def test_a_socket_that_answers_is_left_alone_and_named(tmp_path: Path) -> None:
    path = tmp_path / "shard-0"
    mine = SocketFile(path)
    with listening(path), listening(mine.private):
        inode = path.stat().st_ino
        with pytest.raises(SocketTaken, match=rf"another process listens at {path}"):
            mine.check_free()
        with pytest.raises(SocketTaken):
            mine.publish()
        mine.remove()
        assert path.stat().st_ino == inode
        assert not mine.private.exists()


def test_a_socket_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "shard-0"
    with listening(path):
        pass
    mine = SocketFile(path)
    mine.check_free()
    with listening(mine.private):
        mine.publish()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        mine.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_successors_socket_is_kept_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "shard-0"
    mine = SocketFile(path)
    with listening(mine.private):
        mine.publish()
        successor = tmp_path / "new"
        with listening(successor):
            successor.rename(path)
            mine.remove()
            assert path.exists()


def test_a_file_that_is_not_a_socket_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "shard-0"
    path.write_text("mine")
    with pytest.raises(SocketTaken, match="is not a socket"):
        SocketFile(path).check_free()
    assert path.read_text() == "mine"


def test_no_other_user_reaches_a_shard_whatever_the_umask(tmp_path: Path) -> None:
    """gRPC creates the socket with the umask's mode."""
    mine = SocketFile(tmp_path / "shard-0")
    server = grpc.server(ThreadPoolExecutor(1))
    before = os.umask(0)
    try:
        with for_this_user_only():
            server.add_insecure_port(f"unix:{mine.private}")
        assert stat.S_IMODE(mine.private.stat().st_mode) == 0o600
        server.start()
        mine.publish()
        assert stat.S_IMODE(mine.path.stat().st_mode) == 0o600
        assert os.umask(0) == 0
    finally:
        os.umask(before)
        server.stop(grace=None).wait()
        mine.remove()
