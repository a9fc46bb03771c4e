"""The log of keyed requests, in memory that outlives the router: the next router continues their answers from it.

It has two halves, of which one is written to. When that is full, the runs that live are copied to the other one, whose
first record is written last. Each record has a checksum that depends on the half's generation, so that reading ends at
the first record that a killed router has not finished, or that is left from an earlier generation. The log has prompts
and answers: it is never a file, and nothing of it is logged.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import orjson
import structlog

from millrace_router.request.continuation import Beginning, KnownToken, TokenWriter
from millrace_router.request.names import Names

MAX_LOG_BYTES = 1 << 26
"""64 MiB, of which only what is written takes memory."""
MOST_LIVE = 0.75
"""Share of a half that the runs may fill when they are copied; the newest stay in the log."""
LARGEST = 0.125
"""Share of a half above which a request does not enter the log."""
MAX_TRIES = 2
"""Routers that may die with a run without a further token of it; then it may be the reason."""
FORM = 1
"""Changes with the form of the log."""

_PREFIX, _HEAD = struct.Struct("<IIB"), struct.Struct("<IQ32s")
_RUN, _BEGINNING, _END = struct.Struct("<I"), struct.Struct("<IHxxIQ"), struct.Struct("<Iq")
_TOKEN, _NUMBER = struct.Struct("<IHHIf"), struct.Struct("<I12x")
HEAD, START, EXPANDED, BEGINNING, TOKENS, ENDED, TRIED, FORGET = range(1, 9)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A keyed request, as far as another router needs it; without credentials."""

    scope: bytes
    body_digest: bytes
    target: str
    """Path and query."""
    headers: Mapping[str, str]
    body: bytes
    names: Names
    key_name: str = ""
    """The name of the client's key; "" for none."""
    address: str = ""
    """The client's."""
    needs_client: bool = False
    """Whether it had a credential, without which it cannot be submitted again."""

    def packed(self) -> bytes:
        """Return it as bytes."""
        head = {
            "scope": self.scope.hex(),
            "digest": self.body_digest.hex(),
            "target": self.target,
            "headers": dict(self.headers),
            "stream": self.names.stream,
            "key": self.names.key.hex(),
            "key_name": self.key_name,
            "address": self.address,
            "needs_client": self.needs_client,
        }
        packed = orjson.dumps(head)
        return _RUN.pack(len(packed)) + packed + self.body

    @classmethod
    def unpacked(cls, data: bytes) -> Start:
        """Read what `packed` has written."""
        (length,) = _RUN.unpack_from(data)
        head = orjson.loads(data[_RUN.size : _RUN.size + length])
        return cls(
            scope=bytes.fromhex(head["scope"]),
            body_digest=bytes.fromhex(head["digest"]),
            target=head["target"],
            headers=head["headers"],
            body=data[_RUN.size + length :],
            names=Names(head["stream"], bytes.fromhex(head["key"])),
            key_name=head["key_name"],
            address=head["address"],
            needs_client=head["needs_client"],
        )


@dataclass(slots=True)
class LoggedRun:
    """A run that an earlier router has not forgotten."""

    start: Start
    packed_start: bytes
    packed_tokens: bytearray = field(default_factory=bytearray)
    beginnings: dict[int, Beginning] = field(default_factory=dict)
    expanded: bytes = b""
    """The body's `input` with what it refers to; empty if it refers to nothing."""
    num_tries: int = 0
    """Routers that have continued it without a further token."""

    @property
    def has_ended(self) -> bool:
        """Whether its tokens are all there are."""
        return self.start.names.ended_at is not None

    @property
    def tokens(self) -> list[KnownToken]:
        """The tokens, in the order in which its choices got them."""
        return [
            KnownToken(choice, token_id, logprob, bool(closed))
            for _, choice, closed, token_id, logprob in _TOKEN.iter_unpack(self.packed_tokens)
        ]


class RunRecorder:
    """Writes the tokens of one run to the log."""

    def __init__(self, run_log: RunLog, number: int, start: bytes, names: Names) -> None:
        self._log = run_log
        self._names = names
        self._number = number
        self._start = start
        self._expanded = b""
        self._beginnings = bytearray()
        self._tokens = bytearray()
        self._followers: dict[int, list[TokenWriter]] = {}
        """What gets the tokens of each choice, too."""
        self._num_tries = self._tried_at = 0
        self._is_kept = True
        self._is_tried = False
        """Whether this router has been counted among those that have continued it without a further token."""

    def expand(self, expanded: bytes) -> None:
        """Note the body's `input` with what it refers to, if it is not too large."""
        if self._is_kept and self._log.takes(expanded):
            self._expanded = _RUN.pack(self._number) + expanded
            self._log.write(EXPANDED, self._expanded)

    def begin(self, choice: int, beginning: Beginning) -> None:
        if self._is_kept:
            packed = _BEGINNING.pack(self._number, choice, *beginning)
            self._beginnings += packed
            self._log.write(BEGINNING, packed)

    def writer(self, choice: int) -> TokenWriter:
        number, pack = self._number, _TOKEN.pack
        keep, add = self._tokens.extend, self._log.pending.extend
        followers = self._followers.setdefault(choice, [])

        def write(token_id: int, logprob: float, closed: bool) -> None:  # noqa: FBT001
            for follow in followers:
                follow(token_id, logprob, closed)
            if self._is_kept:
                packed = pack(number, choice, closed, token_id, logprob)
                keep(packed)
                add(packed)

        return write

    @property
    def number(self) -> int | None:
        return self._number if self._is_kept else None

    def cached_tokens(self, choice: int) -> int:
        """Return what is known of a choice with its first token: `Beginning.cached_tokens`; 0 before."""
        for _, number, cached_tokens, _ in _BEGINNING.iter_unpack(self._beginnings):
            if number == choice:
                return int(cached_tokens)
        return 0

    def follow(self, choice: int, num_known: int, follow: TokenWriter) -> Callable[[], None]:
        """Call `follow` with the tokens of a choice behind the first `num_known`, and with further ones.

        Returns what ends it.
        """
        tokens = [each for each in _TOKEN.iter_unpack(self._tokens) if each[1] == choice]
        for _, _, closed, token_id, logprob in tokens[num_known:]:
            follow(token_id, logprob, bool(closed))
        followers = self._followers.setdefault(choice, [])
        followers.append(follow)
        return partial(followers.remove, follow)

    def flush(self) -> None:
        """Write the tokens of all runs."""
        self._log.flush()

    def tried(self) -> None:
        """Note that this router continues it; without a further token since the last time it does not count again."""
        if self._is_tried and len(self._tokens) == self._tried_at:
            return
        self._is_tried = True
        # A copy that makes room for the tokens before it must not have it, too.
        self._log.flush()
        if self._is_kept:
            self._num_tries, self._tried_at = self._num_tries + 1, len(self._tokens)
            self._log.write(TRIED, _RUN.pack(self._number))

    def end(self) -> None:
        """Note that its answer has ended, and when."""
        ended_at = self._names.end()
        if self._is_kept:
            self._log.write(ENDED, _END.pack(self._number, ended_at))

    def forget(self) -> None:
        """Take the run out of the log."""
        if self._is_kept:
            self._log.forget(self._number)

    def detached(self) -> tuple[RunRecorder, LoggedRun] | None:
        """Return the run as far as it is known, and another recorder in the place of this one, which is released.

        None if the log does not have the run.
        """
        if not self._is_kept:
            return None
        run = _runs_of(self.records())[self._number]
        run.start = replace(run.start, names=self._names)
        recorder = self._log.restore(self._number, run, is_tried=self._is_tried)
        self.release()
        return recorder, run

    def release(self) -> None:
        """Keep nothing any longer: the log does not have the run, and further tokens are not noted."""
        self._is_kept = False
        self._start = self._expanded = b""
        self._beginnings.clear()
        self._tokens.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes in the log."""
        parts = (self._start, self._expanded, self._beginnings, self._tokens)
        return sum(map(len, parts))

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Yield the records of the run, from its start on."""
        yield START, _RUN.pack(self._number) + self._start
        if self._expanded:
            yield EXPANDED, self._expanded
        size = _BEGINNING.size
        for place in range(0, len(self._beginnings), size):
            yield BEGINNING, bytes(self._beginnings[place : place + size])
        if self._tokens:
            yield TOKENS, bytes(self._tokens)
        if len(self._tokens) == self._tried_at:
            for _ in range(self._num_tries):
                yield TRIED, _RUN.pack(self._number)
        if self._names.ended_at is not None:
            yield ENDED, _END.pack(self._number, self._names.ended_at)

    def restore(self, run: LoggedRun, *, is_tried: bool = False) -> None:
        """Take what is known of the run."""
        self._is_tried = is_tried and run.num_tries > 0
        for choice, beginning in run.beginnings.items():
            self._beginnings += _BEGINNING.pack(self._number, choice, *beginning)
        self._tokens += run.packed_tokens
        if run.expanded:
            self._expanded = _RUN.pack(self._number) + run.expanded
        self._num_tries, self._tried_at = run.num_tries, len(self._tokens)


class RunLog:
    """The log; one router at a time has it."""

    def __init__(
        self,
        memory: mmap.mmap | bytearray,
        fingerprint: bytes,
    ) -> None:
        """`fingerprint`, of 32 bytes, is of model and version: runs of another one are not continued."""
        self._view = memoryview(memory)
        self._half_bytes = len(memory) // 2
        self._fingerprint = fingerprint
        self._generation, runs = self._read()
        self._live: dict[int, RunRecorder] = {}
        self._next_number = 1 + max(runs, default=0)
        self._position = 0
        self._is_released = False
        self.pending = bytearray()
        """Tokens of a step, which `flush` writes."""
        self._restored = [(self.restore(*numbered), numbered[1]) for numbered in runs.items()]
        self.num_forgotten = 0
        """Runs that live and had to leave the log, which was full."""
        self._copy()

    @classmethod
    def of_file(cls, descriptor: int, fingerprint: bytes) -> RunLog:
        """Open the memory of an inherited file, which may be empty. Raises OSError."""
        return cls(_mapped(descriptor), fingerprint)

    def release(self) -> None:
        """Write nothing from now on: another router has the log."""
        self.flush()
        self._is_released = True

    def retake(self) -> None:
        """Write again, over what another router has written, which is gone."""
        self._is_released = False
        self._generation = max(self._head_of(0)[0], self._head_of(1)[0], self._generation)
        self.pending.clear()
        self._copy()

    def recorder(self, number: int) -> RunRecorder | None:
        """Return what records the run with this number, if the log has it."""
        return self._live.get(number)

    def restored(self) -> list[tuple[RunRecorder, LoggedRun]]:
        """Return the runs of the former router, once, in the order in which they began."""
        restored, self._restored = self._restored, []
        return restored

    def begin(self, start: Start) -> RunRecorder | None:
        """Add a run, unless it would take more than `LARGEST` of a half."""
        packed = start.packed()
        if not self.takes(packed):
            return None
        number, self._next_number = self._next_number, self._next_number + 1
        recorder = self._live[number] = RunRecorder(self, number, packed, start.names)
        for kind, payload in recorder.records():
            self.write(kind, payload)
        return recorder

    def takes(self, data: bytes) -> bool:
        """Return whether the data of one request are small enough."""
        return len(data) <= self._half_bytes * LARGEST

    def write(self, kind: int, payload: bytes) -> None:
        """Write a record behind the tokens so far."""
        self.flush()
        self._write(kind, payload)

    def forget(self, number: int) -> None:
        """Take a run out."""
        self._live.pop(number).release()
        self.write(FORGET, _RUN.pack(number))

    def restore(self, number: int, run: LoggedRun, *, is_tried: bool = False) -> RunRecorder:
        """Return a recorder that goes on with a run; `is_tried` says whether this router is among `run.num_tries`."""
        recorder = self._live[number] = RunRecorder(self, number, run.packed_start, run.start.names)
        recorder.restore(run, is_tried=is_tried)
        return recorder

    def flush(self) -> None:
        """Write the tokens of a step."""
        if self.pending:
            self._write(TOKENS, self.pending)
            self.pending.clear()

    def _write(self, kind: int, payload: bytes | bytearray) -> None:
        if self._is_released:
            return
        end = self._position + _PREFIX.size + len(payload)
        if end > self._half_bytes:
            # The copy has what is in the payload, as each run keeps its own records.
            self._copy()
            return
        self._put(self._position, kind, payload)
        self._position = end

    def _put(self, position: int, kind: int, payload: bytes | bytearray) -> None:
        begin = (self._generation & 1) * self._half_bytes + position
        tail = _PREFIX.pack(0, len(payload), kind)[4:]
        checksum = zlib.crc32(payload, zlib.crc32(tail, self._generation & 0xFFFFFFFF))
        record = checksum.to_bytes(4, "little") + tail + payload
        self._view[begin : begin + len(record)] = record

    def _copy(self) -> None:
        """Copy the runs that live to the other half, and go on there."""
        self._generation += 1
        self._position = _PREFIX.size + _HEAD.size
        room = int(self._half_bytes * MOST_LIVE) - self._position
        for number, run in reversed(self._live.items()):
            room -= run.num_bytes + 3 * _PREFIX.size
            if room < 0:
                self._drop_up_to(number)
                break
        for run in self._live.values():
            for kind, payload in run.records():
                self._put(self._position, kind, payload)
                self._position += _PREFIX.size + len(payload)
        self._put(0, HEAD, _HEAD.pack(FORM, self._generation, self._fingerprint))

    def _drop_up_to(self, last: int) -> None:
        """Drop the runs that began before the one with the number `last`, and this one."""
        old = [number for number in self._live if number <= last]
        for number in old:
            self._live.pop(number).release()
        self.num_forgotten += len(old)
        log.warning(
            "The log of keyed requests is full: the oldest cannot be continued", count=len(old)
        )

    def _read(self) -> tuple[int, dict[int, LoggedRun]]:
        """Return the generation of the newer half, and its runs; none if they are of another fingerprint."""
        generation, fingerprint = max(map(self._head_of, (0, 1)))
        if fingerprint != self._fingerprint:
            return generation, {}
        try:
            return generation, _runs_of(self._records(generation))
        except (KeyError, TypeError, ValueError, struct.error) as error:
            log.warning("The log of keyed requests cannot be read, and is ignored", why=str(error))
            return generation, {}

    def _head_of(self, half: int) -> tuple[int, bytes]:
        """Return generation and fingerprint of a half; (0, b"") if it has none."""
        begin = half * self._half_bytes + _PREFIX.size
        form, generation, fingerprint = _HEAD.unpack_from(self._view, begin)
        if form != FORM or generation & 1 != half:
            return 0, b""
        records = self._records(generation)
        return (generation, fingerprint) if next(records, (0, b""))[0] == HEAD else (0, b"")

    def _records(self, generation: int) -> Iterator[tuple[int, bytes]]:
        """Yield the kinds and payloads of a half's records, up to the first that is not whole."""
        begin = (generation & 1) * self._half_bytes
        end = begin + self._half_bytes
        while begin + _PREFIX.size <= end:
            checksum, length, kind = _PREFIX.unpack_from(self._view, begin)
            first = begin + _PREFIX.size
            if first + length > end:
                return
            data = self._view[begin + 4 : first + length]
            if not kind or zlib.crc32(data, generation & 0xFFFFFFFF) != checksum:
                return
            yield kind, bytes(self._view[first : first + length])
            begin = first + length


def _mapped(descriptor: int) -> mmap.mmap:
    os.set_inheritable(descriptor, False)  # noqa: FBT003
    if os.fstat(descriptor).st_size < MAX_LOG_BYTES:
        os.ftruncate(descriptor, MAX_LOG_BYTES)
    return mmap.mmap(descriptor, MAX_LOG_BYTES)


def _runs_of(records: Iterator[tuple[int, bytes]]) -> dict[int, LoggedRun]:
    runs: dict[int, LoggedRun] = {}
    for kind, payload in records:
        if kind == TOKENS:
            _add_tokens(runs, payload)
        elif kind == START:
            (number,) = _RUN.unpack_from(payload)
            packed = payload[_RUN.size :]
            runs[number] = LoggedRun(Start.unpacked(packed), packed)
        elif kind == FORGET:
            (number,) = _RUN.unpack(payload)
            runs.pop(number, None)
        elif kind != HEAD and (run := runs.get(*_RUN.unpack_from(payload))) is not None:
            _note(run, kind, payload)
    return runs


def _add_tokens(runs: Mapping[int, LoggedRun], payload: bytes) -> None:
    size, numbers = _TOKEN.size, list(_NUMBER.iter_unpack(payload))
    if len(set(numbers)) == 1 and (run := runs.get(numbers[0][0])) is not None:
        # All tokens of a run that was copied.
        run.packed_tokens += payload
        run.num_tries = 0
        return
    for place, (number,) in enumerate(numbers):
        if (run := runs.get(number)) is not None:
            run.packed_tokens += payload[place * size : (place + 1) * size]
            run.num_tries = 0


def _note(run: LoggedRun, kind: int, payload: bytes) -> None:
    if kind == BEGINNING:
        _, choice, cached_tokens, check = _BEGINNING.unpack(payload)
        run.beginnings[choice] = Beginning(cached_tokens, check)
    elif kind == EXPANDED:
        run.expanded = payload[_RUN.size :]
    elif kind == TRIED:
        run.num_tries += 1
    else:
        _, run.start.names.ended_at = _END.unpack(payload)
