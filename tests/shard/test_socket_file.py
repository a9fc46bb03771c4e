"""Whose socket it is: real ones, in a folder."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millrace_shard.socket_file import SocketFile, SocketTaken


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


def test_a_successors_socket_survives_the_end(tmp_path: Path) -> None:
    path = tmp_path / "shard-0"
    mine = SocketFile(path)
    with listening(mine.private):
        mine.publish()
        successor = tmp_path / "new"
        with listening(successor):
            successor.rename(path)
            mine.remove()
            assert path.exists()


def test_what_is_no_socket_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "shard-0"
    path.write_text("mine")
    with pytest.raises(SocketTaken, match="is not a socket"):
        SocketFile(path).check_free()
    assert path.read_text() == "mine"
