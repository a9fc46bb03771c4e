"""The unix socket of a shard. A shard neither takes over nor removes the socket of another process."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class SocketTaken(RuntimeError):  # noqa: N818
    """Another process uses the path."""


@contextmanager
def for_this_user_only() -> Iterator[None]:
    """Files and sockets that any thread creates inside have at most mode 0600."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


class SocketFile:
    """A path that appears once a server listens there.

    gRPC removes any file at its address at its start and at its end. So gRPC listens at `private`, and `publish`
    renames that socket to `path`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.private = path.with_name(f"{path.name}.{os.getpid()}")
        self._inode: tuple[int, int] | None = None

    def check_free(self) -> None:
        """Raise SocketTaken if a process listens at the path, or it is no socket. An abandoned socket is free."""
        try:
            mode = self.path.stat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise SocketTaken(f"{self.path} exists and is not a socket")
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(self.path))
            except (ConnectionRefusedError, FileNotFoundError):
                return
        raise SocketTaken(f"another process listens at {self.path}; choose another --uds-path")

    def publish(self) -> None:
        """Rename the listening socket from `private` to `path`. Raises SocketTaken."""
        self.check_free()
        self._inode = _inode(self.private)
        self.private.rename(self.path)

    def remove(self) -> None:
        """Remove the path, unless another process has replaced the published socket."""
        self.private.unlink(missing_ok=True)
        try:
            if _inode(self.path) == self._inode:
                self.path.unlink()
        except FileNotFoundError:
            return


def _inode(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
