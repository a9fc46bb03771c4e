"""The event loop's end of the journal: notes what was said, and waits for nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from millrace_proto import generate_pb2 as pb
from millrace_router.journal.records import Kind
from millrace_router.journal.shard_state import ShardState
from millrace_router.journal.writer import Item, JournalWriter, Page
from millrace_router.telemetry.instruments import Counter

MOST_WAITING = 8192
"""Records that wait to be written; further ones are dropped."""

log = structlog.get_logger(__name__)


class Journal:
    """Notes requests, answers and failures. Its methods never raise: a request must not suffer from its journal.

    A file holds every record from its first to its last. When some were dropped, because the disk was slow or full,
    the next one is the first of a new file, which begins with a snapshot.
    """

    def __init__(self, scribe: JournalWriter, dropped: Counter) -> None:
        """`dropped` counts records that are lost."""
        self._scribe = scribe
        self._dropped = dropped
        self._dropped.inc(0)
        self._ledger = ShardState()
        self._is_behind = False
        self._is_off = False
        self._num_lost = 0
        """Of those that the scribe lost, how many are counted."""
        self._num_dropped = 0
        """Since the last page."""
        scribe.start()

    def sent(self, message: pb.StepRequest) -> None:
        """A message leaves for the shards."""
        self._note(self._sent, message)

    def answered(self, answers: Sequence[pb.StepResponse]) -> None:
        """The ranks, in their order, have answered the oldest message without an answer."""
        self._note(self._answered, answers)

    def failed(self, kind: str, reason: str) -> None:
        """The epoch has ended early."""
        self._note(self._failed, {"kind": kind, "reason": reason})

    async def close(self) -> None:
        """Write what is left."""
        if not await asyncio.to_thread(self._scribe.close):
            log.warning("the end of the journal could not be written")
        self._count_lost()

    def _sent(self, message: pb.StepRequest) -> None:
        if message.HasField("open"):
            self._ledger.end_epoch()
        self._prepare()
        self._ledger.sent(message)
        self._put(Item(Kind.REQUEST, time.time_ns(), message))

    def _answered(self, answers: Sequence[pb.StepResponse]) -> None:
        self._prepare()
        self._ledger.answered(answers[0])
        now = time.time_ns()
        others = (Item(Kind.ACKNOWLEDGEMENT, now, answer) for answer in answers[1:])
        self._put(*others, Item(Kind.ANSWER, now, answers[0]))

    def _failed(self, failure: Mapping[str, Any]) -> None:
        ledger = self._ledger
        self._prepare()
        content = {"epoch": ledger.epoch, **failure, "unanswered": ledger.unanswered}
        self._put(Item(Kind.FAILURE, time.time_ns(), content))

    def _prepare(self) -> None:
        """Before the ledger learns of something new: have a new file begun if it is time."""
        scribe = self._scribe
        if scribe.num_lost != self._num_lost:
            self._count_lost()
        if scribe.wants_page or self._is_behind:
            self._turn_page()

    def _put(self, *items: Item) -> None:
        """Hand records over, all of them or none."""
        scribe = self._scribe
        if self._is_behind or len(scribe.inbox) >= MOST_WAITING:
            self._fall_behind(len(items))
            return
        scribe.inbox.extend(items)
        scribe.wake()

    def _turn_page(self) -> None:
        """Have a new file begun, if what the shards hold can be told and there is room for it."""
        scribe, ledger = self._scribe, self._ledger
        if not ledger.is_restorable or len(scribe.inbox) > MOST_WAITING // 2:
            return
        scribe.wants_page = self._is_behind = False
        snapshot = ledger.snapshot() if ledger.epoch else None
        scribe.inbox.append(Item(Kind.SNAPSHOT, time.time_ns(), Page(snapshot, self._num_dropped)))
        self._num_dropped = 0

    def _fall_behind(self, count: int) -> None:
        if not self._is_behind:
            self._is_behind = True
            log.error("the journal cannot keep up; records are dropped")
        self._num_dropped += count
        self._dropped.inc(count)

    def _count_lost(self) -> None:
        lost = self._scribe.num_lost - self._num_lost
        self._num_lost += lost
        self._num_dropped += lost
        self._dropped.inc(lost)

    def _note(self, note: Callable[[Any], None], subject: object) -> None:
        """The edge to serving: a defect ends the journal and nothing else."""
        if self._is_off:
            return
        try:
            note(subject)
        except Exception:
            self._is_off = True
            log.exception("the journal has a defect and ends here")
