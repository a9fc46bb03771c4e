"""The records in a frame, each with a kind and a time."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from millrace_router.journal.errors import JournalDamaged

HEAD = Struct("<BQI")
"""Kind, nanoseconds since 1970, bytes of the payload."""


class Kind(IntEnum):
    """The kind of a record's payload. Readers skip unknown kinds."""

    HEADER = 1
    """JSON of a `Header`; the first record of each file, and no other."""
    SNAPSHOT = 2
    """A StepRequest with the state of the shards: see `shard_state.py`."""
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


class Record(NamedTuple):
    """A record of a frame."""

    kind: int
    time_ns: int
    payload: bytes


def pack(kind: Kind, time_ns: int, payload: bytes) -> bytes:
    """Write a record."""
    return HEAD.pack(kind, time_ns, len(payload)) + payload


def split(records: bytes) -> Iterator[Record]:
    """Read the records of a frame; raises JournalDamaged."""
    position = 0
    while position < len(records):
        if len(records) - position < HEAD.size:
            raise JournalDamaged("a record has no head")
        kind, time_ns, size = HEAD.unpack_from(records, position)
        position += HEAD.size
        if len(records) - position < size:
            raise JournalDamaged("a record is longer than its frame")
        yield Record(kind, time_ns, records[position : position + size])
        position += size
