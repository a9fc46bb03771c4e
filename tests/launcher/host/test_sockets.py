"""Sockets of dead servers are removed, and no other files."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from millrace_launcher.errors import ArgumentValidation
from millrace_launcher.host.claims import refuse_busy_port
from millrace_launcher.host.leftovers import clear_socket, remove_dead_socket
from millrace_testing.launcher.ports import kept_port


def test_dead_socket_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    clear_socket(path)
    assert not path.exists()
    clear_socket(path)


def test_live_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        assert not remove_dead_socket(path)
        with pytest.raises(ArgumentValidation, match="another server is listening"):
            clear_socket(path)
        assert path.is_socket()


def test_other_files_stay(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(ArgumentValidation, match="is not a socket"):
        clear_socket(path)
    assert path.read_text() == "precious"


def test_port() -> None:
    with kept_port() as port:
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
            with pytest.raises(ArgumentValidation, match=f"cannot listen on 127.0.0.1 port {port}"):
                refuse_busy_port("127.0.0.1", port)
        refuse_busy_port("127.0.0.1", port)
