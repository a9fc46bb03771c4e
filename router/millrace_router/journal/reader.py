"""Reads a journal: one file, or all files of a folder in order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path

from google.protobuf.message import DecodeError

from millrace_proto import generate_pb2 as pb
from millrace_router.journal.frames import (
    JournalDamaged,
    JournalError,
    JournalUnusable,
    Kind,
    Record,
    read_frames,
    split,
)
from millrace_router.journal.header import Header, header_from_json
from millrace_router.journal.rotation import journal_files


@dataclass(frozen=True, slots=True)
class Sent:
    """A message to the shards."""

    time_ns: int
    message: pb.StepRequest


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to the oldest unanswered message."""

    time_ns: int
    answer: pb.StepResponse
    """The answer of rank 0."""
    acknowledgements: tuple[pb.StepResponse, ...] = ()
    """The answers of the other ranks, in order."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The failure of an epoch."""

    time_ns: int
    kind: str
    """The `reason` of `millrace_recoveries_total`."""
    reason: str
    unanswered: tuple[int, ...]
    """Steps in flight, the oldest first."""


@dataclass(frozen=True, slots=True)
class AdapterChanged:
    """All ranks have an adapter in a slot, or have freed it."""

    time_ns: int
    epoch: int
    slot: int
    digest: str | None
    """None: the slot is free."""


@dataclass(frozen=True, slots=True)
class ImagePut:
    """All ranks have the pixels of an image in a slot."""

    time_ns: int
    epoch: int
    slot: int
    first_row: int
    """The row of the features of its first tile."""
    num_tiles: int
    digest: str | None
    """None: the journal keeps no token ids, and no digests."""
    height: int = 0
    """Of a tile, in pixels; 0 in journals of older versions."""
    width: int = 0


Event = Sent | Answered | Failed | AdapterChanged | ImagePut


@dataclass(frozen=True, slots=True)
class Epoch:
    """The record of one epoch from its beginning, without gaps."""

    index: int
    """Number of the epoch in the journal, from 1."""
    header: Header
    began_ns: int
    events: Iterator[Event] = field(repr=False, compare=False)
    """Events in order; valid until the next epoch is read."""

    @property
    def began(self) -> datetime:
        """The start of the epoch by the router's clock."""
        return datetime.fromtimestamp(self.began_ns / 1e9, UTC)


def read_epochs(path: Path) -> Iterator[Epoch]:
    """Yield the epochs of a file or folder. Reading the next epoch skips the unread events of the last one.

    Raises:
        JournalUnusable: no journal was found, or it belongs to another version.
        JournalDamaged: a record is damaged.

    """
    index = 0

    def index_of(item: tuple[Header, Event]) -> int:
        nonlocal index
        index += isinstance(item[1], Sent) and item[1].message.HasField("open")
        return index

    for number, items in groupby(read_events(path), key=index_of):
        header, first = next(items)
        # The same iterator goes on.
        rest = map(itemgetter(1), items)  # noqa: B031
        yield Epoch(number, header, first.time_ns, chain([first], rest))


def read_events(path: Path) -> Iterator[tuple[Header, Event]]:
    """Yield all events in order, each with the header of its file; raises as `read_epochs` does.

    An epoch whose beginning is missing is skipped.
    """
    joiner = _Joiner()
    for file in _files(path):
        header: Header | None = None
        try:
            for record in _records(file):
                if header is None:
                    header = _header_of(record)
                    joiner.begin_file(header)
                    continue
                for event in joiner.events_of(record):
                    yield header, event
        except (JournalError, DecodeError, ValueError, KeyError, TypeError) as error:
            kind = type(error) if isinstance(error, JournalError) else JournalDamaged
            raise kind(f"{file.name}: {error}") from error


def _files(path: Path) -> list[Path]:
    files = journal_files(path)
    if not files:
        raise JournalUnusable(f"{path} contains no journal")
    return files


def _records(file: Path) -> Iterator[Record]:
    try:
        with file.open("rb") as stream:
            for records in read_frames(stream):
                yield from split(records)
    except OSError as error:
        raise JournalUnusable(f"cannot be read: {error.strerror}") from error


def _header_of(record: Record) -> Header:
    if record.kind != Kind.HEADER:
        raise JournalDamaged("begins without a header")
    return header_from_json(record.payload)


class _Joiner:
    """Joins the records of consecutive files.

    Files of version 0.1 may begin in mid-epoch, with a snapshot and repeated requests: these are skipped where the file
    before has the epoch up to there.
    """

    def __init__(self) -> None:
        self._header: Header | None = None
        self._is_whole = False
        """Whether the events of this epoch are there from its beginning on."""
        self._epoch = 0
        self._last_sent = -1
        self._last_answered = -1
        self._acknowledgements: list[pb.StepResponse] = []
        self._adapters: dict[int, str | None] = {}
        """Digests by adapter slot in this epoch."""

    def begin_file(self, header: Header) -> None:
        before, self._header = self._header, header
        if before is None or (before.life, before.part + 1) != (header.life, header.part):
            self._is_whole = False
        self._acknowledgements.clear()

    def events_of(self, record: Record) -> Iterator[Event]:
        """Return the event of `record`, if it is new."""
        if record.kind == Kind.REQUEST:
            yield from self._request(record)
        elif record.kind == Kind.GAP:
            self._is_whole = False
        elif self._is_whole:
            yield from self._other(record)

    def _other(self, record: Record) -> Iterator[Event]:
        match record.kind:
            case Kind.SNAPSHOT:
                snapshot = pb.StepRequest.FromString(record.payload)
                numbers = snapshot.epoch, snapshot.number
                self._is_whole = numbers == (self._epoch, self._last_answered)
            case Kind.ACKNOWLEDGEMENT:
                self._acknowledgements.append(pb.StepResponse.FromString(record.payload))
            case Kind.ANSWER:
                yield self._answer(record)
            case Kind.ADAPTER:
                yield from self._adapter(record)
            case Kind.IMAGE:
                yield from self._image(record)
            case Kind.FAILURE:
                yield _failure(record)
            case _:
                pass

    def _request(self, record: Record) -> Iterator[Event]:
        message = pb.StepRequest.FromString(record.payload)
        if message.HasField("open"):
            self._is_whole = True
            self._epoch, self._last_sent, self._last_answered = message.epoch, -1, -1
            self._adapters.clear()
        elif not self._is_whole or (
            message.epoch == self._epoch and message.number <= self._last_sent
        ):
            return
        self._check(message.epoch, message.number, self._last_sent)
        self._last_sent = message.number
        yield Sent(record.time_ns, message)

    def _adapter(self, record: Record) -> Iterator[Event]:
        content = json.loads(record.payload)
        epoch, slot, digest = (content[name] for name in ("epoch", "slot", "digest"))
        if epoch == self._epoch and self._adapters.get(slot) != digest:
            self._adapters[slot] = digest
            yield AdapterChanged(record.time_ns, epoch, slot, digest)

    def _image(self, record: Record) -> Iterator[Event]:
        put = json.loads(record.payload)
        if put["epoch"] == self._epoch:
            yield ImagePut(
                record.time_ns,
                put["epoch"],
                put["slot"],
                put["row"],
                put["tiles"],
                put.get("digest"),
                put.get("height", 0),
                put.get("width", 0),
            )

    def _answer(self, record: Record) -> Answered:
        answer = pb.StepResponse.FromString(record.payload)
        self._check(answer.epoch, answer.number, self._last_answered)
        self._last_answered = answer.number
        others = tuple(self._acknowledgements)
        self._acknowledgements.clear()
        return Answered(record.time_ns, answer, others)

    def _check(self, epoch: int, number: int, last: int) -> None:
        if (epoch, number) != (self._epoch, last + 1):
            raise JournalDamaged(
                f"step {number} of epoch {epoch} follows step {last} of epoch {self._epoch}"
            )


def _failure(record: Record) -> Failed:
    content = json.loads(record.payload)
    return Failed(record.time_ns, content["kind"], content["reason"], tuple(content["unanswered"]))
