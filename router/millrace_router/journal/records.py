"""What frames hold: records, each with its kind and the time at which it happened."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from millrace_router.journal.errors import JournalDamaged

HEAD = Struct("<BQI")
"""Kind, nanoseconds since 1970, bytes of the payload."""


class Kind(IntEnum):
    """What a record's payload is. Readers pass over kinds they do not know."""

    HEADER = 1
    """JSON of a `Header`; first in each file, and nowhere else."""
    SNAPSHOT = 2
    """A StepRequest that says what the shards hold: see `ledger.py`."""
    REQUEST = 3
    """A StepRequest as it was sent; where token ids are not kept, zeros stand for them."""
    ACKNOWLEDGEMENT = 4
    """The StepResponse of a rank other than 0, in the order of ranks; the answer they belong to follows."""
    ANSWER = 5
    """The StepResponse of rank 0."""
    PROMPT = 6
    """JSON: what stands for a prompt whose ids are not kept. The request that admits it follows."""
    FAILURE = 7
    """JSON: what ended an epoch, and the steps that were in flight."""
    GAP = 8
    """JSON: how many records were dropped before this file began."""
    END = 9
    """Empty: the router stopped in good order."""


class Record(NamedTuple):
    """One of them."""

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
