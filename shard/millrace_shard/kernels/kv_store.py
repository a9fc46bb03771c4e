"""KV that outlives its process: a file in memory with a header, a directory of blocks, and the tensors of all layers.

The fork server makes the file and holds it; each of its shards inherits it, and maps it at the warm-up. A shard that is
killed loses nothing that it has written. What of it is valid only the router knows, which compares the directory with
its own books. The order of writes lets it: a block loses its state before anything else of it changes, and has its key
before it is sealed. A file of another layout, or with a header that is not whole, begins anew.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace_shard.arrays import Ints

MAGIC = b"millrkv1"
KEY_BYTES = 32
HEADER = np.dtype([("magic", "S8"), ("layout", "u1", (32,)), ("life", "<u8")])
ENTRY = np.dtype(
    [
        ("state", "<u4"),
        ("checksum", "<u4"),
        ("generation", "<u8"),
        ("owner", "<u8"),
        ("key", "u1", (KEY_BYTES,)),
        ("reserved", "<u8"),
    ]
)
EMPTY, OPEN, SEALED = range(3)
"""States: without an owner; written to by its owner; full and acknowledged under its key."""
DIRECTORY_AT = mmap.PAGESIZE
ALIGNMENT = 2 << 20
"""Bytes to which each tensor is aligned, so that large pages fit."""


@dataclass(frozen=True, slots=True)
class Directory:
    """What a store says of its blocks that have an owner, in columns [n]."""

    life: int
    """The number that the router gave to its books of these blocks; 0: it gave none."""
    blocks: Ints
    owners: NDArray[np.uint64]
    """The request that each was handed out to."""
    generations: NDArray[np.uint64]
    """The step that handed each out."""
    keys: tuple[bytes, ...]
    """b"" for a block that is not sealed."""


class KVStore:
    """The file. One thread uses it."""

    def __init__(self, fd: int, *, verifies: bool = False) -> None:
        """Use the file `fd`, which may be empty. With `verifies`, full blocks have checksums, and are checked."""
        self._fd = fd
        self._verifies = verifies
        self._tensors: list[Tensor] = []
        self._firsts: Sequence[int] = ()
        self._num_verified: int | None = None
        self._header = np.zeros((), HEADER)
        self._entries = np.zeros(0, ENTRY)
        self.generation = 0
        """The step that hands out blocks."""

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory that the file has now."""
        return os.fstat(self._fd).st_blocks * 512

    def tensors(
        self,
        like: Sequence[Tensor],
        name: str,
        *,
        firsts: Sequence[int] | None = None,
        num_verified: int | None = None,
    ) -> list[Tensor]:
        """Tensors like `like`, whose first axis is the block, in the file; checksums are of the first `num_verified`.

        They keep their values and the directory, if the file has tensors of the same shapes, dtypes and `name`. The
        blocks of each tensor are numbered from `firsts` on, or from 0.
        """
        self._num_verified = num_verified
        self._firsts = firsts or [0] * len(like)
        count = max(first + len(each) for first, each in zip(self._firsts, like, strict=True))
        layout = _digest(like, f"{name} {self._firsts}" if any(self._firsts) else name)
        size, offsets = _places(like, count)
        if not self._has(layout, size):
            self._begin(layout, size)
        elif self._tensors:
            return self._tensors
        memory = _mapped(self._fd, size)
        self._header, self._entries = _parts(memory, count)
        self._tensors = [
            torch.frombuffer(memory, dtype=torch.uint8, count=each.nbytes, offset=offset)
            .view(each.dtype)
            .view(each.shape)
            if each.nbytes
            else each
            for each, offset in zip(like, offsets, strict=True)
        ]
        return self._tensors

    def begin(self, life: int) -> None:
        """The router opens an epoch with the books `life`; other books than before make all blocks empty."""
        if life == 0 or self._header["life"] != life:
            self._header["life"] = 0
            self._entries["state"] = EMPTY
            self._header["life"] = life

    def hand_out(self, blocks: Ints, owners: Sequence[int]) -> None:
        """Give `blocks` [n] to the requests `owners`, before anything is written to them."""
        entries = self._entries
        entries["state"][blocks] = EMPTY
        entries["owner"][blocks] = owners
        entries["generation"][blocks] = self.generation
        entries["state"][blocks] = OPEN

    def seal(self, blocks: Ints, keys: Sequence[bytes]) -> None:
        """Name what full `blocks` hold, once the router has acknowledged it."""
        entries = self._entries
        entries["key"][blocks] = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
        if self._verifies:
            entries["checksum"][blocks] = [self._checksum(block) for block in blocks.tolist()]
        entries["state"][blocks] = SEALED

    def unseal(self, blocks: Ints) -> None:
        """What `blocks` hold has no name any more; those that are sealed stay with their owners."""
        states = self._entries["state"]
        states[blocks[states[blocks] == SEALED]] = OPEN

    def directory(self) -> Directory:
        """Every block that has an owner, but for blocks whose checksum is wrong."""
        entries = self._entries
        blocks = np.flatnonzero(entries["state"] != EMPTY)
        if self._verifies:
            blocks = np.array([each for each in blocks.tolist() if self._is_whole(each)], np.int64)
        chosen = entries[blocks]
        return Directory(
            int(self._header["life"]),
            blocks,
            chosen["owner"],
            chosen["generation"],
            tuple(
                key.tobytes() if state == SEALED else b""
                for key, state in zip(chosen["key"], chosen["state"].tolist(), strict=True)
            ),
        )

    def _has(self, layout: bytes, size: int) -> bool:
        """Whether the file is whole, and of this layout."""
        if os.fstat(self._fd).st_size != size:
            return False
        header = np.frombuffer(os.pread(self._fd, HEADER.itemsize, 0), HEADER)[0]
        return bool(header["magic"] == MAGIC and header["layout"].tobytes() == layout)

    def _begin(self, layout: bytes, size: int) -> None:
        """Make the file empty. Nothing may use its former tensors."""
        self._tensors = []
        self._header, self._entries = np.zeros((), HEADER), np.zeros(0, ENTRY)
        os.ftruncate(self._fd, 0)
        os.ftruncate(self._fd, size)
        header = np.zeros((), HEADER)
        header["layout"], header["magic"] = np.frombuffer(layout, np.uint8), MAGIC
        os.pwrite(self._fd, header.tobytes(), 0)

    def _checksum(self, block: int) -> int:
        value = 0
        named = zip(self._tensors[: self._num_verified], self._firsts, strict=False)
        for each, first in named:
            if 0 <= block - first < len(each):
                part = each[block - first].contiguous().view(torch.uint8)
                value = zlib.crc32(part.numpy().data, value)
        return value

    def _is_whole(self, block: int) -> bool:
        entry = self._entries[block]
        return bool(entry["state"] != SEALED or entry["checksum"] == self._checksum(block))


def _digest(like: Sequence[Tensor], name: str) -> bytes:
    shapes = [(tuple(each.shape), str(each.dtype)) for each in like]
    return sha256(repr((name, ENTRY, shapes)).encode()).digest()


def _places(like: Sequence[Tensor], num_blocks: int) -> tuple[int, list[int]]:
    """The bytes of the file, and where in it each tensor begins."""
    end, offsets = DIRECTORY_AT + num_blocks * ENTRY.itemsize, []
    for each in like:
        offsets.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = offsets[-1] + each.nbytes
    return end, offsets


def _mapped(fd: int, size: int) -> mmap.mmap:
    memory = mmap.mmap(fd, size)
    # Without effect unless the system has large pages for such memory.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _parts(memory: mmap.mmap, num_blocks: int) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """The header, an array without dimensions, and the directory [num_blocks]."""
    header = np.frombuffer(memory, HEADER, 1).reshape(())
    return header, np.frombuffer(memory, ENTRY, num_blocks, DIRECTORY_AT)
