"""Packed weights in files: a later start reads them and does not pack the model's weights again.

A file holds the packed weights of one rank. Its name has the digest of the model's files, and a digest of what else
packing depends on. The digest of the model's files is kept under their inodes, sizes and times, since computing it
takes seconds for each gigabyte. A file that is damaged is removed, and counts as absent. Reading and writing never
fail a start: without space, or in a folder that cannot be written, the weights are packed anew each time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import mmap
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from threading import Thread
from typing import IO

import torch
from torch import Tensor

from millrace_shard.kernels.build import BuildError, check_owners
from millrace_shard.kernels.kept_results import write_text
from millrace_shard.weights.checkpoint_files import changed_recently, file_state
from millrace_shard.weights.read_ahead import readable_size

KEEPING = "packed-weights"
"""The name of the thread that writes."""
FORMAT_VERSION = 1
"""Changes with the layout of files, and with the codes that the readers of checkpoints return."""
KEPT, UNFINISHED, DIGEST = ".packed", ".part", ".sha256"
"""Endings of whole files, of files that are being written, and of digests of the model's files."""
MAGIC = b"millrace packed\n"
ALIGNMENT = 64
"""Of weights in the file and in memory, as the operators read them."""
CHUNK = 1 << 22
READERS = 4
"""Threads, which read and check the weights in parallel."""
SPARE_BYTES = 1 << 30
"""What is left free on the disk."""
FOOTER_BYTES = 8 + 32 + len(MAGIC)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """The place of a packed weight in a file."""

    offset: int
    num_bytes: int
    digest: str


class PackedWeights:
    """The packed weights of one load. Names are equal for equal parts of the model's tensors."""

    def __init__(
        self, folder: Path, sources: Sequence[Path], versions: Sequence[str], *, limit: int
    ) -> None:
        """Read what `folder` has for the files `sources`, which are packed as `versions` says.

        All files in `folder` have at most `limit` bytes.
        """
        self._folder = folder
        self._sources = [path.resolve() for path in sources]
        self._limit = limit
        self._version = _digest_of(map(str, (FORMAT_VERSION, *versions)))[:16]
        self._new: dict[str, Tensor] = {}
        self._identity: str | None = None
        self._kept: dict[str, Tensor] = {}
        with suppress(OSError):
            self._identity = _identity(self._sources)
            content = (folder / f"{self._identity}{DIGEST}").read_text()
            self._kept = self._read(self._path(content))

    @property
    def is_kept(self) -> bool:
        """Whether an earlier start has kept the weights."""
        return bool(self._kept)

    def get(self, name: str) -> Tensor | None:
        """The packed weight `name`, uint8 [n]; it is the caller's."""
        return self._kept.pop(name, None)

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def put(self, name: str, packed: Tensor) -> None:
        """Keep `packed`, uint8 [n], which must not change."""
        self._new[name] = packed

    def keep(self) -> Thread | None:
        """Write the new weights in a thread, so that the server does not wait; returns it, or None without any."""
        new, self._new, self._kept = self._new, {}, {}
        if not new or self._identity is None or self._limit == 0:
            return None
        # Not in the thread: the process makes its socket meanwhile, with a mask of modes that suits no folder.
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        thread = Thread(target=self._keep, args=(new,), name=KEEPING, daemon=True)
        thread.start()
        return thread

    def _path(self, content: str) -> Path:
        return self._folder / f"{content[:32]}-{self._version}{KEPT}"

    def _read(self, path: Path) -> dict[str, Tensor]:
        started = time.monotonic()
        try:
            check_owners(self._folder, path)
            weights = _read(path)
        except FileNotFoundError:
            return {}
        except BuildError as error:
            logger.warning("packed weights are not read: %s", error)
            return {}
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("%s is damaged, and weights are packed again: %s", path, error)
            path.unlink(missing_ok=True)
            return {}
        # The oldest file goes first, and this one has been used.
        with suppress(OSError):
            os.utime(path)
        logger.info("packed weights of an earlier start: %.2f s", time.monotonic() - started)
        return weights

    def _keep(self, new: dict[str, Tensor]) -> None:
        try:
            content = _content(self._sources)
            if _identity(self._sources) != self._identity:
                return
            check_owners(self._folder)
            path = self._path(content)
            if not path.exists():
                self._write(path, new)
            if path.exists() and not any(map(changed_recently, self._sources)):
                write_text(self._folder / f"{self._identity}{DIGEST}", content)
        except (OSError, BuildError) as error:
            logger.warning("packed weights are not kept in %s: %s", self._folder, error)

    def _write(self, path: Path, new: dict[str, Tensor]) -> None:
        needed = sum(tensor.numel() for tensor in new.values())
        if needed > self._limit:
            size, limit = readable_size(needed), readable_size(self._limit)
            logger.info("packed weights are not kept: %s, and the limit is %s", size, limit)
            return
        _make_room(self._folder, self._limit - needed)
        if shutil.disk_usage(self._folder).free < needed + SPARE_BYTES:
            logger.warning("packed weights are not kept: %s has too little space", self._folder)
            return
        part = path.with_suffix(UNFINISHED)
        with _owned(part) as file:
            if file is None:
                return
            try:
                _write(file, new)
                part.replace(path)
            except OSError:
                part.unlink(missing_ok=True)
                raise
        logger.info("packed weights are kept in %s, %s", path, readable_size(needed))


def _write(file: IO[bytes], weights: dict[str, Tensor]) -> None:
    entries, offset = dict[str, tuple[int, int, str]](), 0
    for name, tensor in weights.items():
        data = tensor.numpy().data
        file.write(data)
        entries[name] = (offset, len(data), hashlib.sha256(data).hexdigest())
        padding = -len(data) % ALIGNMENT
        file.write(bytes(padding))
        offset += len(data) + padding
    index = json.dumps(entries).encode()
    file.write(index + len(index).to_bytes(8, "little") + hashlib.sha256(index).digest() + MAGIC)
    file.flush()


def _read(path: Path) -> dict[str, Tensor]:
    """The weights in a file, in one mapping. Raises OSError, and ValueError and more for a damaged file."""
    with path.open("rb") as file:
        entries, size = _entries(file)
        # Huge pages, as in weight_memory.h; by default shared memory has none.
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = memoryview(memory)

        def read(entry: Entry) -> bool:
            digest = hashlib.sha256()
            for start in range(entry.offset, entry.offset + entry.num_bytes, CHUNK):
                end = min(start + CHUNK, entry.offset + entry.num_bytes)
                if os.preadv(file.fileno(), [whole[start:end]], start) != end - start:
                    return False
                digest.update(whole[start:end])
            return digest.hexdigest() == entry.digest

        with ThreadPoolExecutor(READERS) as pool:
            if not all(pool.map(read, entries.values())):
                raise ValueError("a weight has another digest")
    everything = torch.frombuffer(memory, dtype=torch.uint8)
    return {
        name: everything[entry.offset : entry.offset + entry.num_bytes]
        for name, entry in entries.items()
    }


def _entries(file: IO[bytes]) -> tuple[dict[str, Entry], int]:
    """The entries of a file, and the bytes before its index."""
    size = os.fstat(file.fileno()).st_size
    file.seek(max(0, size - FOOTER_BYTES))
    footer = file.read()
    if len(footer) != FOOTER_BYTES or not footer.endswith(MAGIC):
        raise ValueError("its end is missing")
    start = size - FOOTER_BYTES - int.from_bytes(footer[:8], "little")
    if start < 0:
        raise ValueError("its index is too long")
    file.seek(start)
    index = file.read(size - FOOTER_BYTES - start)
    if hashlib.sha256(index).digest() != footer[8:40]:
        raise ValueError("its index has another digest")
    return {name: Entry(*values) for name, values in json.loads(index).items()}, start


@contextmanager
def _owned(path: Path) -> Iterator[BufferedRandom | None]:
    """The file `path`, empty, for this process only; None while another one writes it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "r+b") as file:
        yield file if _is_ours(file, path) else None


def _is_ours(file: IO[bytes], path: Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The process that held the lock may have published the file.
        if os.fstat(file.fileno()).st_ino != path.stat().st_ino:
            return False
    except (BlockingIOError, FileNotFoundError):
        return False
    file.truncate(0)
    return True


def _make_room(folder: Path, limit: int) -> None:
    """Remove unfinished files of processes that ended, then the oldest files until at most `limit` bytes are left."""
    for path in folder.glob(f"*{UNFINISHED}"):
        with suppress(OSError), path.open("r+b") as file:
            if _is_ours(file, path):
                path.unlink()
    sizes = list[tuple[float, int, Path]]()
    for path in folder.glob(f"*{KEPT}"):
        with suppress(OSError):
            status = path.stat()
            sizes.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in sizes)
    for _, size, path in sorted(sizes):
        if total <= limit:
            break
        path.unlink(missing_ok=True)
        total -= size
        logger.info("removed %s, the oldest packed weights, to keep the limit", path)
    contents = {path.name[:32] for path in folder.glob(f"*{KEPT}")}
    for path in folder.glob(f"*{DIGEST}"):
        with suppress(OSError):
            if path.read_text()[:32] not in contents:
                path.unlink()


def _identity(paths: Iterable[Path]) -> str:
    return _digest_of(map(file_state, paths))


def _content(paths: Iterable[Path]) -> str:
    """The digest of the files' contents, in this order. Raises OSError."""
    digests = []
    for path in paths:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return digests[0] if len(digests) == 1 else _digest_of(digests)


def _digest_of(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
