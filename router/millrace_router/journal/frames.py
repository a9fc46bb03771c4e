"""The outer layer of a journal file: compressed frames with checksums, which distinguish an incomplete end from damage.

    file  = MAGIC frame*
    frame = MARK, bytes of the body, bytes it inflates to, CRC-32 of both and of the body, body (zlib)

After a kill, at most the last frame is incomplete; after a loss of power, the end may also be zeros.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from struct import Struct
from typing import BinaryIO

from millrace_router.journal.errors import JournalDamaged, JournalUnusable

MAGIC = b"millrace journal\n"
MARK = b"\xf5frame\r\n"
LEVEL = 1
"""zlib level: steps resemble each other, so higher levels gain little."""
MAX_INFLATED = 1 << 30
SIZES = Struct("<II")
CHECKSUM = Struct("<I")
HEAD_SIZE = len(MARK) + SIZES.size + CHECKSUM.size


def frame(records: bytes | bytearray) -> bytes:
    """Compress and seal `records`."""
    body = zlib.compress(records, LEVEL)
    sizes = SIZES.pack(len(body), len(records))
    return b"".join((MARK, sizes, CHECKSUM.pack(_checksum(sizes, body)), body))


def read_frames(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the records of each complete frame.

    Raises:
        JournalUnusable: the file does not begin with the magic of a journal.
        JournalDamaged: a frame before the last one is damaged.

    """
    magic = stream.read(len(MAGIC))
    if not MAGIC.startswith(magic.rstrip(b"\0")):
        raise JournalUnusable("is no journal")
    position = len(MAGIC)
    while head := stream.read(HEAD_SIZE):
        size, records = _body(stream, head)
        if records is None:
            _check_nothing_follows(stream, position)
            return
        yield records
        position += HEAD_SIZE + size


def _body(stream: BinaryIO, head: bytes) -> tuple[int, bytes | None]:
    """The size of a frame's body, and its records; None for a damaged or incomplete frame."""
    if len(head) < HEAD_SIZE or not head.startswith(MARK):
        return 0, None
    sizes = head[len(MARK) : len(MARK) + SIZES.size]
    size, inflated = SIZES.unpack(sizes)
    body = stream.read(size)
    if CHECKSUM.unpack(head[-CHECKSUM.size :])[0] != _checksum(sizes, body):
        return size, None
    if inflated > MAX_INFLATED:
        raise JournalDamaged(f"a frame of {inflated} bytes exceeds the limit")
    inflater = zlib.decompressobj()
    try:
        records = inflater.decompress(body, inflated or 1)
    except zlib.error as error:
        raise JournalDamaged(f"a frame does not inflate: {error}") from error
    if len(records) != inflated or inflater.unconsumed_tail:
        raise JournalDamaged("a frame does not inflate to its declared size")
    return size, records


def _check_nothing_follows(stream: BinaryIO, position: int) -> None:
    stream.seek(position + 1)
    if MARK in stream.read():
        raise JournalDamaged(f"the frame at byte {position} is damaged, and other frames follow")


def _checksum(sizes: bytes, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(sizes))
