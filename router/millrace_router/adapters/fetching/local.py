"""Reads an adapter from a folder; a folder that a client names lies below the root, with every link resolved."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from millrace_router.adapters.fetching.errors import Invalid, NotFound, Unavailable
from millrace_router.adapters.fetching.peft_config import CONFIG_FILE
from millrace_router.adapters.fetching.source_files import (
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
        folder, real_root = _folder(path, root)
        before = _states(folder)
        files = _read_once(folder, real_root, max_bytes)
        # A configuration and weights of two versions would be a third one.
        if _states(folder) == before:
            return files
    raise Unavailable("the files change while they are read")


def _folder(path: str, root: str | None) -> tuple[Path, Path | None]:
    """The folder, and the root above it, with links resolved."""
    if not path or len(path) > MAX_PATH_LENGTH or not path.isprintable():
        raise NotFound
    try:
        real_root = None if root is None else Path(root).resolve(strict=True)
        folder = (Path(path) if real_root is None else real_root / path).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        raise NotFound from None
    if not folder.is_dir() or not _is_below(folder, real_root):
        raise NotFound
    return folder, real_root


def _states(folder: Path) -> list[tuple[int, int, int] | None]:
    """What changes with each file: inode, size and time of the last change; None for one that is not there."""
    found: list[tuple[int, int, int] | None] = []
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        try:
            status = (folder / name).stat()
        except OSError:
            found.append(None)
        else:
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return found


def _read_once(folder: Path, real_root: Path | None, max_bytes: int) -> SourceFiles:
    sizes = {}
    for name in (CONFIG_FILE, WEIGHTS_FILE, *PICKLES):
        file = _resolve(folder / name, real_root)
        if file is not None:
            sizes[name] = file.stat().st_size
    check_listing(sizes, max_bytes)
    return SourceFiles(
        _read(folder / CONFIG_FILE, real_root, sizes[CONFIG_FILE]),
        _read(folder / WEIGHTS_FILE, real_root, sizes[WEIGHTS_FILE]),
    )


def _is_below(path: Path, root: Path | None) -> bool:
    return root is None or (path != root and path.is_relative_to(root))


def _resolve(path: Path, root: Path | None) -> Path | None:
    """The file itself behind links; None if there is none, or elsewhere."""
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError):
        return None
    return real if real.is_file() and _is_below(real, root) else None


def _read(path: Path, root: Path | None, size: int) -> bytearray:
    """Read a file of `size` bytes once; links that appear after its path was resolved are not followed."""
    real = _resolve(path, root)
    if real is None:
        raise Unavailable(f"{path.name} was removed while it was read")
    try:
        descriptor = _open(real)
    except OSError as error:
        raise Unavailable(f"{path.name} cannot be read: {os.strerror(error.errno or 0)}") from None
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Invalid(f"{path.name} is not a file")
        data = bytearray(size)
        view, filled = memoryview(data), 0
        while filled < size and (count := file.readinto(view[filled:])):
            filled += count
        if filled < size or file.read(1):
            raise Unavailable(f"{path.name} changed while it was read")
    return data


def _open(path: Path) -> int:
    """Open a resolved path one folder at a time, so that none of its parts may be a link."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    *folders, name = path.parts[1:]
    at = os.open("/", flags | os.O_DIRECTORY)
    try:
        for folder in folders:
            inner = os.open(folder, flags | os.O_DIRECTORY, dir_fd=at)
            os.close(at)
            at = inner
        return os.open(name, flags | os.O_NONBLOCK, dir_fd=at)
    finally:
        os.close(at)
