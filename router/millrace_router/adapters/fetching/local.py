"""Reads an adapter from a folder; a folder that a client names lies below the root, with every link resolved."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millrace_router.adapters.fetching.errors import Invalid, NotFound, Unavailable
from millrace_router.adapters.fetching.source_files import (
    CONFIG_FILE,
    PICKLES,
    WEIGHTS_FILE,
    SourceFiles,
    check_listing,
)

MAX_PATH_LENGTH = 4096
MAX_READS = 4
"""Attempts to read files that do not change meanwhile."""


def read_folder(path: str, root: str | None, max_bytes: int) -> SourceFiles:
    """Read the files of the folder `path`.

    With `root`, which is for paths of clients, `path` is relative to it, and neither the folder nor a file may lie
    elsewhere.

    Raises:
        NotFound: there is no such folder, or it lies elsewhere; both look the same.
        Invalid, TooLarge: by `check_listing`.
        Unavailable: the disk fails, or the files change all the time.

    """
    for _ in range(MAX_READS):
        with _open_folder(path, root) as folder:
            before = folder.states()
            files = folder.read(max_bytes)
            # A configuration and weights of two versions would be a third one.
            if folder.states() == before == folder.states_read:
                return files
    raise Unavailable("the files change while they are read")


_State = tuple[int, int, int, int]
"""What changes with a file: inode, size in bytes, and the times of its last change and last renaming in ns."""


def _state(status: os.stat_result) -> _State:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@contextmanager
def _open_folder(path: str, root: str | None) -> Iterator[_OpenFolder]:
    """The folder, with the links of its path resolved; it stays the same one if another takes its place."""
    if not path or len(path) > MAX_PATH_LENGTH or not path.isprintable():
        raise NotFound
    try:
        real_root = None if root is None else Path(root).resolve(strict=True)
        real = (Path(path) if real_root is None else real_root / path).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        raise NotFound from None
    if not real.is_dir() or not _is_below(real, real_root):
        raise NotFound
    try:
        descriptor = _open(real, os.O_DIRECTORY)
    except OSError as error:
        raise Unavailable(f"the folder cannot be read: {os.strerror(error.errno or 0)}") from None
    try:
        yield _OpenFolder(descriptor, real, real_root)
    finally:
        os.close(descriptor)


class _OpenFolder:
    """The files of one folder, found by its descriptor."""

    def __init__(self, descriptor: int, path: Path, root: Path | None) -> None:
        self._descriptor = descriptor
        self._path = path
        self._root = root
        self.states_read: list[_State | None] = []
        """The states of the files that were read."""

    def states(self) -> list[_State | None]:
        """Return the state of each file, behind links; None for one that is not there."""
        states: list[_State | None] = []
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            try:
                states.append(_state(os.stat(name, dir_fd=self._descriptor)))
            except OSError:
                states.append(None)
        return states

    def read(self, max_bytes: int) -> SourceFiles:
        sizes = {
            name: size
            for name in (CONFIG_FILE, WEIGHTS_FILE, *PICKLES)
            if (size := self._size(name)) is not None
        }
        check_listing(sizes, max_bytes)
        self.states_read.clear()
        return SourceFiles(*(self._read(name, sizes[name]) for name in (CONFIG_FILE, WEIGHTS_FILE)))

    def _size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none, or if a link leads elsewhere."""
        try:
            target = self._target(name)
            status = os.stat(name, dir_fd=self._descriptor) if target is None else target.stat()
        except (OSError, RuntimeError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def _target(self, name: str) -> Path | None:
        """Return the file behind a link; None if the file is not a link.

        Raises:
            OSError, RuntimeError: the file does not exist, or the link leads elsewhere or in circles.

        """
        if not stat.S_ISLNK(os.lstat(name, dir_fd=self._descriptor).st_mode):
            return None
        target = (self._path / os.readlink(name, dir_fd=self._descriptor)).resolve(strict=True)
        if not _is_below(target, self._root):
            raise FileNotFoundError
        return target

    def _read(self, name: str, size: int) -> bytes:
        """Read a file of `size` bytes once; a link that appears after the file was found is not followed."""
        try:
            target = self._target(name)
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = (
                os.open(name, flags, dir_fd=self._descriptor)
                if target is None
                else _open(target, os.O_NONBLOCK)
            )
        except FileNotFoundError:
            raise Unavailable(f"{name} was removed while it was read") from None
        except (OSError, RuntimeError) as error:
            reason = os.strerror(getattr(error, "errno", None) or 0)
            raise Unavailable(f"{name} cannot be read: {reason}") from None
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise Invalid(f"{name} is not a file")
            self.states_read.append(_state(status))
            data = bytearray(size)
            view, filled = memoryview(data), 0
            while filled < size and (count := file.readinto(view[filled:])):
                filled += count
            if filled < size or file.read(1):
                raise Unavailable(f"{name} changed while it was read")
        return bytes(data)


def _is_below(path: Path, root: Path | None) -> bool:
    return root is None or (path != root and path.is_relative_to(root))


def _open(path: Path, flags: int) -> int:
    """Open a resolved path one folder at a time, so that none of its parts may be a link."""
    always = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    *folders, name = path.parts[1:] or (".",)
    at = os.open("/", always | os.O_DIRECTORY)
    try:
        for folder in folders:
            inner = os.open(folder, always | os.O_DIRECTORY, dir_fd=at)
            os.close(at)
            at = inner
        return os.open(name, always | flags, dir_fd=at)
    finally:
        os.close(at)
