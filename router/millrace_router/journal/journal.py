"""Records messages on the event loop, without waiting."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from millrace_proto import generate_pb2 as pb
from millrace_router.journal.frames import Kind
from millrace_router.journal.writer import Item, JournalWriter, NewFile
from millrace_router.request.images import PreparedImage
from millrace_router.telemetry.instruments import Counter

MAX_WAITING = 8192
"""The largest number of records that wait to be written; further records are dropped."""

log = structlog.get_logger(__name__)


class Journal:
    """Records requests, answers and failures. Its methods never raise, so that no request fails because of the journal.

    A file begins with an epoch and is without gaps. Once records are dropped, because the disk was slow or full or the
    epoch too long, the rest of the epoch is dropped too.
    """

    def __init__(self, writer: JournalWriter, dropped: Counter) -> None:
        self._writer = writer
        self._dropped = dropped
        self._dropped.inc(0)
        self._epoch = 0
        self._unanswered: deque[int] = deque()
        """Numbers of the steps in flight."""
        self._is_behind = False
        self._is_off = False
        self._num_lost = 0
        """Records lost by the writer that are counted."""
        self._num_dropped = 0
        """Records dropped since the last file began."""
        writer.start()

    def sent(self, message: pb.StepRequest) -> None:
        """Record a message to the shards."""
        self._note(self._sent, message)

    def answered(self, answers: Sequence[pb.StepResponse]) -> None:
        """Record the answers of all ranks, in order, to the oldest unanswered message."""
        self._note(self._answered, answers)

    def failed(self, kind: str, reason: str) -> None:
        """Record the failure of the epoch."""
        self._note(self._failed, {"kind": kind, "reason": reason})

    def adapter_changed(self, epoch: int, slot: int, digest: str | None) -> None:
        """Record the adapter in a slot of the shards."""
        self._note(self._adapter_changed, {"epoch": epoch, "slot": slot, "digest": digest})

    def image_put(self, epoch: int, slot: int, first_row: int, image: PreparedImage) -> None:
        """Record the image in a slot of the shards, without its pixels."""
        put = {"epoch": epoch, "slot": slot, "row": first_row, "tiles": image.num_tiles}
        size = {"height": image.height, "width": image.width}
        self._note(self._image_put, {**put, **size, "digest": image.digest.hex()})

    async def close(self) -> None:
        if not await asyncio.to_thread(self._writer.close):
            log.warning("the end of the journal could not be written")
        self._count_lost()

    def _sent(self, message: pb.StepRequest) -> None:
        if message.HasField("open"):
            self._begin_epoch(message.epoch)
        self._unanswered.append(message.number)
        self._put(Item(Kind.REQUEST, time.time_ns(), message))

    def _answered(self, answers: Sequence[pb.StepResponse]) -> None:
        answer, number = answers[0], self._unanswered.popleft()
        if (answer.epoch, answer.number) != (self._epoch, number):
            raise ValueError(f"step {answer.number} is answered instead of {number}")
        now = time.time_ns()
        others = (Item(Kind.ACKNOWLEDGEMENT, now, each) for each in answers[1:])
        self._put(*others, Item(Kind.ANSWER, now, answer))

    def _failed(self, failure: Mapping[str, Any]) -> None:
        content = {"epoch": self._epoch, **failure, "unanswered": list(self._unanswered)}
        self._put(Item(Kind.FAILURE, time.time_ns(), content))

    def _adapter_changed(self, change: Mapping[str, Any]) -> None:
        self._put(Item(Kind.ADAPTER, time.time_ns(), change))

    def _image_put(self, put: Mapping[str, Any]) -> None:
        self._put(Item(Kind.IMAGE, time.time_ns(), put))

    def _begin_epoch(self, epoch: int) -> None:
        """Begin a new file if the last one is full or has ended, and the queue has room for it."""
        self._epoch = epoch
        self._unanswered.clear()
        self._count_lost()
        writer = self._writer
        if not (writer.wants_new_file or self._is_behind) or len(writer.inbox) > MAX_WAITING // 2:
            return
        writer.wants_new_file = self._is_behind = False
        writer.inbox.append(Item(Kind.HEADER, time.time_ns(), NewFile(self._num_dropped)))
        self._num_dropped = 0

    def _put(self, *items: Item) -> None:
        """Pass records to the writer, all of them or none."""
        writer = self._writer
        if writer.num_lost != self._num_lost:
            self._count_lost()
        if self._is_behind or len(writer.inbox) >= MAX_WAITING:
            self._fall_behind(len(items))
            return
        writer.inbox.extend(items)
        writer.wake()

    def _fall_behind(self, count: int) -> None:
        if not self._is_behind:
            self._is_behind = True
            log.error("the journal cannot keep up; records are dropped")
        self._num_dropped += count
        self._dropped.inc(count)

    def _count_lost(self) -> None:
        lost = self._writer.num_lost - self._num_lost
        self._num_lost += lost
        self._num_dropped += lost
        self._dropped.inc(lost)

    def _note(self, note: Callable[[Any], None], subject: object) -> None:
        """Call `note`; a defect ends the journal and nothing else."""
        if self._is_off:
            return
        try:
            note(subject)
        except Exception:
            self._is_off = True
            log.exception("the journal has a defect and ends here")
