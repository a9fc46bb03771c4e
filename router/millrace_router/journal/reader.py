"""Reads a journal: one file, or all files of a folder in order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from google.protobuf.message import DecodeError

from millrace_proto import generate_pb2 as pb
from millrace_router.journal.errors import JournalDamaged, JournalError, JournalUnusable
from millrace_router.journal.frames import read_frames
from millrace_router.journal.header import Header, header_from_json
from millrace_router.journal.records import Kind, Record, split
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
class Resumed:
    """The first record, or the first one after missing ones, in the middle of an epoch."""

    time_ns: int
    snapshot: pb.StepRequest
    """The state of the shards: see `shard_state.py`."""
    num_dropped: int = 0


@dataclass(frozen=True, slots=True)
class AdapterChanged:
    """All ranks have an adapter in a slot, or have freed it."""

    time_ns: int
    epoch: int
    slot: int
    digest: str | None
    """None: the slot is free."""


Happened = Sent | Answered | Failed | AdapterChanged
Event = Happened | Resumed


@dataclass(frozen=True, slots=True)
class Epoch:
    """The record of one epoch, or of a part of it, without gaps."""

    index: int
    """Number of the epoch in the journal, from 1."""
    header: Header
    began_ns: int
    snapshot: pb.StepRequest | None
    """The state of the shards at the first event; None when the record begins with the epoch."""
    events: Iterator[Happened] = field(repr=False, compare=False)
    """Events in order; valid until the next epoch is read."""

    @property
    def began(self) -> datetime:
        """The start of the epoch by the router's clock."""
        return datetime.fromtimestamp(self.began_ns / 1e9, UTC)


def read_epochs(path: Path) -> Iterator[Epoch]:
    """Yield the epochs of a file or folder. Reading the next epoch skips the unread events of the last one.

    Raises:
        JournalUnusable: there is no journal, or it belongs to another version.
        JournalDamaged: a record is damaged.

    """
    events = _Events(path)
    index = 0
    while (start := events.next_start()) is not None:
        header = events.header
        events.take()
        index += 1
        yield Epoch(
            index,
            header,
            start.time_ns,
            start.snapshot if isinstance(start, Resumed) else None,
            chain([start] if isinstance(start, Sent) else [], events.rest()),
        )


def read_events(path: Path) -> Iterator[tuple[Header, Event]]:
    """Yield all events in order, each with the header of its file; raises as `read_epochs` does."""
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


class _Events:
    """The events of a journal, with a look-ahead of one."""

    def __init__(self, path: Path) -> None:
        self._events = read_events(path)
        self._next = next(self._events, None)

    @property
    def header(self) -> Header:
        assert self._next is not None
        return self._next[0]

    def peek(self) -> Event | None:
        return None if self._next is None else self._next[1]

    def take(self) -> None:
        self._next = next(self._events, None)

    def next_start(self) -> Sent | Resumed | None:
        """The first event of the next epoch."""
        while (event := self.peek()) is not None:
            if isinstance(event, Sent | Resumed) and _begins(event):
                return event
            self.take()
        return None

    def rest(self) -> Iterator[Happened]:
        """The events up to the next epoch."""
        while (event := self.peek()) is not None and not isinstance(event, Resumed):
            if _begins(event):
                return
            self.take()
            yield event


def _begins(event: Event) -> bool:
    return isinstance(event, Resumed) or (
        isinstance(event, Sent) and event.message.HasField("open")
    )


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
    """Joins the records of consecutive files: skips snapshots and requests that repeat what is known."""

    def __init__(self) -> None:
        self._header: Header | None = None
        self._is_next = False
        self._num_dropped = 0
        self._epoch = 0
        self._last_sent = -1
        self._last_answered = -1
        self._acknowledgements: list[pb.StepResponse] = []
        self._adapters: dict[int, str | None] = {}
        """Digests by adapter slot in this epoch."""

    def begin_file(self, header: Header) -> None:
        """Begin a file."""
        before = self._header
        self._is_next = before is not None and (before.life, before.part + 1) == (
            header.life,
            header.part,
        )
        if not self._is_next:
            self._epoch = 0
        self._header = header
        self._num_dropped = 0
        self._acknowledgements.clear()

    def events_of(self, record: Record) -> Iterator[Event]:
        """The event of `record`, if it is new."""
        match record.kind:
            case Kind.GAP:
                self._num_dropped = json.loads(record.payload)["dropped_records"]
            case Kind.SNAPSHOT:
                yield from self._snapshot(record)
            case Kind.REQUEST:
                yield from self._request(record)
            case Kind.ACKNOWLEDGEMENT:
                self._acknowledgements.append(pb.StepResponse.FromString(record.payload))
            case Kind.ANSWER:
                yield self._answer(record)
            case Kind.ADAPTER:
                yield from self._adapter(record)
            case Kind.FAILURE:
                yield _failure(record)
            case _:
                pass

    def _snapshot(self, record: Record) -> Iterator[Event]:
        snapshot = pb.StepRequest.FromString(record.payload)
        is_known = (
            self._is_next
            and not self._num_dropped
            and (snapshot.epoch, snapshot.number) == (self._epoch, self._last_answered)
        )
        if not is_known:
            self._epoch = snapshot.epoch
            self._last_sent = self._last_answered = snapshot.number
            self._adapters.clear()
            yield Resumed(record.time_ns, snapshot, self._num_dropped)

    def _request(self, record: Record) -> Iterator[Event]:
        message = pb.StepRequest.FromString(record.payload)
        if message.HasField("open"):
            self._epoch, self._last_sent, self._last_answered = message.epoch, -1, -1
            self._adapters.clear()
        elif message.epoch == self._epoch and message.number <= self._last_sent:
            # The file before has this request too, without an answer.
            return
        self._check(message.epoch, message.number, self._last_sent)
        self._last_sent = message.number
        yield Sent(record.time_ns, message)

    def _adapter(self, record: Record) -> Iterator[Event]:
        content = json.loads(record.payload)
        epoch, slot, digest = (content[name] for name in ("epoch", "slot", "digest"))
        # The records after a snapshot repeat what the file before has.
        if epoch == self._epoch and self._adapters.get(slot) != digest:
            self._adapters[slot] = digest
            yield AdapterChanged(record.time_ns, epoch, slot, digest)

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
