"""Records messages on the event loop, without waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from millrace_proto import generate_pb2 as pb
from millrace_router.journal.records import Kind
from millrace_router.journal.shard_state import ShardState
from millrace_router.journal.writer import Item, JournalWriter, NewFile
from millrace_router.telemetry.instruments import Counter

MAX_WAITING = 8192
"""The largest number of records that wait to be written; further records are dropped."""

log = structlog.get_logger(__name__)


class Journal:
    """Records requests, answers and failures. Its methods never raise, so that no request fails because of the journal.

    A file has no gaps. After records were dropped, because the disk was slow or full, a new file begins with a
    snapshot.
    """

    def __init__(self, writer: JournalWriter, dropped: Counter) -> None:
        """`dropped` counts lost records."""
        self._writer = writer
        self._dropped = dropped
        self._dropped.inc(0)
        self._state = ShardState()
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

    async def close(self) -> None:
        """Write the remaining records."""
        if not await asyncio.to_thread(self._writer.close):
            log.warning("the end of the journal could not be written")
        self._count_lost()

    def _sent(self, message: pb.StepRequest) -> None:
        if message.HasField("open"):
            self._state.end_epoch()
        self._prepare()
        self._state.sent(message)
        self._put(Item(Kind.REQUEST, time.time_ns(), message))

    def _answered(self, answers: Sequence[pb.StepResponse]) -> None:
        self._prepare()
        self._state.answered(answers[0])
        now = time.time_ns()
        others = (Item(Kind.ACKNOWLEDGEMENT, now, answer) for answer in answers[1:])
        self._put(*others, Item(Kind.ANSWER, now, answers[0]))

    def _failed(self, failure: Mapping[str, Any]) -> None:
        state = self._state
        self._prepare()
        content = {"epoch": state.epoch, **failure, "unanswered": state.unanswered}
        self._put(Item(Kind.FAILURE, time.time_ns(), content))

    def _adapter_changed(self, change: Mapping[str, Any]) -> None:
        self._prepare()
        self._state.adapter_changed(change["slot"], change["digest"])
        self._put(Item(Kind.ADAPTER, time.time_ns(), change))

    def _prepare(self) -> None:
        """Begin a new file if necessary, before the state changes."""
        writer = self._writer
        if writer.num_lost != self._num_lost:
            self._count_lost()
        if writer.wants_new_file or self._is_behind:
            self._begin_file()

    def _put(self, *items: Item) -> None:
        """Pass records to the writer, all of them or none."""
        writer = self._writer
        if self._is_behind or len(writer.inbox) >= MAX_WAITING:
            self._fall_behind(len(items))
            return
        writer.inbox.extend(items)
        writer.wake()

    def _begin_file(self) -> None:
        """Begin a new file, if a snapshot is possible and the queue has room for it."""
        writer, state = self._writer, self._state
        if not state.is_restorable or len(writer.inbox) > MAX_WAITING // 2:
            return
        writer.wants_new_file = self._is_behind = False
        snapshot = state.snapshot() if state.epoch else None
        writer.inbox.append(
            Item(Kind.SNAPSHOT, time.time_ns(), NewFile(snapshot, self._num_dropped))
        )
        self._num_dropped = 0

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
