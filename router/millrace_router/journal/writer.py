"""The thread that writes the journal, so that only this thread waits for the disk."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from threading import Event, Thread
from typing import Any, NamedTuple

import structlog

from millrace_proto import generate_pb2 as pb
from millrace_router.journal.frames import MAGIC, Kind, frame, pack
from millrace_router.journal.header import Header, header_to_json
from millrace_router.journal.redaction import Redaction
from millrace_router.journal.rotation import JournalFolder

GATHER_SECONDS = 0.1
"""How long records are gathered before they are written; a kill loses as much."""
FRAME_BYTES = 1 << 18
CLOSE_SECONDS = 10.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class NewFile:
    """The start of a new file, at the beginning of an epoch."""

    num_dropped: int
    """Records dropped since the last file began."""


class Item(NamedTuple):
    """A record to write. Its message must not change afterwards."""

    kind: Kind
    time_ns: int
    content: pb.StepRequest | pb.StepResponse | Mapping[str, Any] | NewFile


class JournalWriter:
    """Writes items in the order in which the event loop appends them to `inbox`.

    When a file cannot be written, or has `most_file_bytes`, all records up to the next `NewFile` are lost.
    """

    def __init__(self, folder: JournalFolder, header: Header) -> None:
        self.inbox: deque[Item] = deque()
        self.wants_new_file = True
        """Whether the next epoch should begin with a `NewFile`; the event loop clears it when it appends one."""
        self.num_lost = 0
        """Records that could not be written; only the thread changes it."""
        self._folder = folder
        self._header = header
        self._redaction = Redaction(keeps_tokens=header.keeps_tokens)
        self._wake = Event()
        self._closing = Event()
        self._buffer = bytearray()
        self._num_buffered = 0
        self._file: int | None = None
        self._size = 0
        self._room = 0
        """Bytes for which the folder has made room."""
        self._is_failing = False
        self._thread = Thread(target=self._run, name="journal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread after an item was appended."""
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> bool:
        """Write the remaining items and end the thread; False if that takes longer than `CLOSE_SECONDS`."""
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait()
            self._closing.wait(GATHER_SECONDS)
            self._wake.clear()
            try:
                self._drain()
            except Exception as error:
                log.exception("the journal has a defect")
                self._give_up(error)
        self._finish()

    def _drain(self) -> None:
        while self.inbox:
            item = self.inbox.popleft()
            if isinstance(item.content, NewFile):
                self._begin(item.time_ns, item.content)
            else:
                self._write(item)
        self._flush()

    def _finish(self) -> None:
        self._drain()
        if self._file is not None:
            self._add(pack(Kind.END, time.time_ns(), b""))
            self._flush()
        self._close_file()
        self._folder.close()

    def _close_file(self) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            os.close(file)
        except OSError as error:
            log.warning("the journal cannot be closed", error=str(error))

    def _write(self, item: Item) -> None:
        if self._file is None:
            self.num_lost += 1
            return
        content = item.content
        if isinstance(content, pb.StepRequest):
            for note in self._redaction.notes(content):
                self._add(pack(Kind.PROMPT, item.time_ns, note))
            payload = self._redaction.request(content)
        elif isinstance(content, pb.StepResponse):
            payload = self._redaction.answer(content)
        else:
            assert not isinstance(content, NewFile)
            payload = json.dumps(self._redaction.fields(content)).encode()
        self._add(pack(item.kind, item.time_ns, payload))

    def _begin(self, time_ns: int, new: NewFile) -> None:
        self._flush()
        self._close_file()
        try:
            self._file, self._size = self._folder.begin(), 0
            self._room = self._folder.file_bytes
        except OSError as error:
            self._give_up(error)
            return
        self._add(pack(Kind.HEADER, time_ns, header_to_json(self._header)), counts=False)
        self._header = replace(self._header, part=self._header.part + 1)
        if new.num_dropped:
            gap = json.dumps({"dropped_records": new.num_dropped}).encode()
            self._add(pack(Kind.GAP, time_ns, gap), counts=False)
        self._flush()
        self.wants_new_file = False

    def _add(self, record: bytes, *, counts: bool = True) -> None:
        if self._file is None:
            self.num_lost += counts
            return
        self._buffer += record
        self._num_buffered += counts
        if len(self._buffer) >= FRAME_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._file is None or not self._buffer:
            return
        data = frame(self._buffer)
        if not self._size:
            data = MAGIC + data
        try:
            if self._size + len(data) > self._room:
                self._room += max(len(data), self._folder.file_bytes)
                self._folder.make_room(self._room)
            write_all(self._file, data)
        except OSError as error:
            self._give_up(error)
            return
        self._buffer.clear()
        self._num_buffered = 0
        self._size += len(data)
        if self._is_failing:
            self._is_failing = False
            log.info("the journal is written again")
        if self._size >= self._folder.most_file_bytes:
            log.warning(
                "the epoch is too long for the journal; recording goes on with the next one"
            )
            self._close_file()
        if self._size >= self._folder.file_bytes:
            self.wants_new_file = True

    def _give_up(self, error: Exception) -> None:
        """Close the incomplete file, and drop all records until the next epoch."""
        if not self._is_failing:
            self._is_failing = True
            log.error("the journal cannot be written; records are dropped", error=str(error))
        self._close_file()
        self.wants_new_file = True
        self.num_lost += self._num_buffered
        self._num_buffered = 0
        self._buffer.clear()


def write_all(file: int, data: bytes) -> None:
    """Write `data` to a descriptor; raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
