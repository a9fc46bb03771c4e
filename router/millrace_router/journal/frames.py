"""The layers of a journal file: compressed frames of records, with checksums that show whether an end is damaged.

    file   = MAGIC frame*
    frame  = MARK, bytes of the body, bytes it inflates to, CRC-32 of both and of the body, body (zlib of records)
    record = kind, nanoseconds since 1970, bytes of the payload, payload

After a kill, at most the last frame is incomplete; after a loss of power, the end may also be zeros.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from enum import IntEnum
from struct import Struct
from typing import BinaryIO, NamedTuple


class JournalError(Exception):
    """A journal cannot be written or read."""


class JournalUnusable(JournalError):  # noqa: N818
    """The file is missing, is not a journal, or belongs to another version or model."""


class JournalDamaged(JournalError):  # noqa: N818
    """The content of a journal is damaged; an incomplete end does not count as damage."""


MAGIC = b"millrace journal\n"
MARK = b"\xf5frame\r\n"
LEVEL = 1
"""zlib level: steps resemble each other, so higher levels gain little."""
MAX_INFLATED = 1 << 30
SIZES = Struct("<II")
CHECKSUM = Struct("<I")
HEAD_SIZE = len(MARK) + SIZES.size + CHECKSUM.size
RECORD_HEAD = Struct("<BQI")
"""Kind, time and size of the payload."""


class Kind(IntEnum):
    """The kind of a record's payload. Readers skip unknown kinds."""

    HEADER = 1
    """JSON of a `Header`; the first record of each file, and no other."""
    SNAPSHOT = 2
    """A StepRequest with the state of the shards: only in journals of version 0.1, which may begin in mid-epoch."""
    REQUEST = 3
    """A StepRequest as it was sent; with zeros for token ids if the journal keeps none."""
    ACKNOWLEDGEMENT = 4
    """The StepResponse of a rank other than 0, in order of rank, before rank 0's answer to the same step."""
    ANSWER = 5
    """The StepResponse of rank 0."""
    PROMPT = 6
    """JSON: the description of a prompt without its ids, before the request that admits it."""
    FAILURE = 7
    """JSON: the reason of an epoch's end, and the steps in flight."""
    GAP = 8
    """JSON: the number of records that were dropped before this file."""
    END = 9
    """Empty: the router stopped in an orderly way."""
    ADAPTER = 10
    """JSON: the digest that all ranks have in an adapter slot from now on, or null."""
    IMAGE = 11
    """JSON: the image in an image slot from now on: first row, tiles and, if the journal keeps token ids, digest."""


class Record(NamedTuple):
    """A record of a frame."""

    kind: int
    time_ns: int
    payload: bytes


def frame(records: bytes | bytearray) -> bytes:
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
        raise JournalUnusable("is not a journal")
    position = len(MAGIC)
    while head := stream.read(HEAD_SIZE):
        size, records = _body(stream, head)
        if records is None:
            _check_nothing_follows(stream, position)
            return
        yield records
        position += HEAD_SIZE + size


def _body(stream: BinaryIO, head: bytes) -> tuple[int, bytes | None]:
    """Return the size of a frame's body, and its records; None for a damaged or incomplete frame."""
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


def pack(kind: Kind, time_ns: int, payload: bytes) -> bytes:
    return RECORD_HEAD.pack(kind, time_ns, len(payload)) + payload


def split(records: bytes) -> Iterator[Record]:
    """Read the records of a frame; raises JournalDamaged."""
    position = 0
    while position < len(records):
        if len(records) - position < RECORD_HEAD.size:
            raise JournalDamaged("a record lacks its head")
        kind, time_ns, size = RECORD_HEAD.unpack_from(records, position)
        position += RECORD_HEAD.size
        if len(records) - position < size:
            raise JournalDamaged("a record is longer than its frame")
        yield Record(kind, time_ns, records[position : position + size])
        position += size
