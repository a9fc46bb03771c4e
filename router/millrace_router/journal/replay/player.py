"""Sends the steps of a journal to shards, in order and with as many steps in flight as recorded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from millrace_proto import generate_pb2 as pb
from millrace_router.journal.errors import JournalUnusable
from millrace_router.journal.header import Header
from millrace_router.journal.reader import AdapterChanged, Answered, Epoch, Failed, Happened, Sent
from millrace_router.journal.replay.comparison import Comparison, Difference
from millrace_router.journal.replay.rebuild import Rebuild, sequences_of
from millrace_router.journal.replay.synthetic import fill_in
from millrace_router.shards.errors import ShardError, ShardHung
from millrace_router.shards.step_channel import StepChannel
from millrace_router.shards.wire import ShardInfo

REQUIRED_EQUAL = ("model_type", "vocab_size", "block_size")
"""Properties that must equal those of the recorded shards."""
REPORTED = (
    "dtype",
    "kv_cache_dtype",
    "device_type",
    "attention",
    "world_size",
    "deterministic",
    "max_draft_tokens",
)
"""Properties that may explain other answers."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The result of an epoch's replay."""

    epoch: Epoch
    is_compared: bool
    num_steps: int = 0
    """Answered steps, those without a forward pass included."""
    num_tokens: int = 0
    """Tokens of the recorded answers."""
    recorded_ns: int = 0
    replayed_ns: int = 0
    """Total duration of those steps by the shards' clock."""
    largest_gap: float = 0.0
    difference: Difference | None = None
    failure: Failed | None = None
    """The recorded failure of the epoch."""
    unanswered: tuple[int, ...] = ()
    """Recorded steps without an answer, which are not sent."""


class Player:
    """Replays epochs one after another."""

    def __init__(self, shards: StepChannel, *, step_seconds: float) -> None:
        """A step of more than `step_seconds` counts as failed."""
        self._shards = shards
        self._step_seconds = step_seconds
        self._info: ShardInfo | None = None
        self._room: tuple[dict[str, int], int] | None = None

    async def play(self, epoch: Epoch) -> Outcome:
        """Replay an epoch up to its end or the first difference.

        Raises:
            JournalUnusable: the shards do not match the record.
            ShardError: the epoch cannot begin.

        """
        info = await self._prepare(epoch.header)
        await self._shards.open()
        run = _Run(
            self._shards,
            epoch,
            is_exact=_is_exact(epoch.header, info),
            step_seconds=self._step_seconds,
        )
        try:
            await run.play()
        except ShardError as error:
            run.outcome.difference = Difference(
                step=run.step, what="the step fails in the replay", replayed=str(error)
            )
        return run.outcome

    async def notes(self, header: Header) -> list[str]:
        """Differences between these shards and the recorded ones; raises ShardError."""
        info = await self._ask()
        return [
            f"recorded with {name} {getattr(header.shard, name)}, replayed with {getattr(info, name)}"
            for name in REPORTED
            if getattr(header.shard, name) != getattr(info, name)
        ]

    async def _ask(self) -> ShardInfo:
        if self._info is None:
            self._info = await self._shards.group.info(timeout=self._step_seconds)
        return self._info

    async def _prepare(self, header: Header) -> ShardInfo:
        """Warm up the shards with the recorded sizes."""
        info = await self._ask()
        for name in REQUIRED_EQUAL:
            was, now = getattr(header.shard, name), getattr(info, name)
            if was != now:
                raise JournalUnusable(f"recorded with {name} {was}, but these shards have {now}")
        room = dict(header.warmup), header.capacity.num_blocks
        if room != self._room:
            capacity = await self._shards.group.warm_up(
                **header.warmup,
                num_blocks=header.capacity.num_blocks,
                adapter_pages=header.capacity.adapter_pages or None,
            )
            if capacity.num_blocks != header.capacity.num_blocks:
                raise JournalUnusable(
                    f"recorded with {header.capacity.num_blocks} blocks, but these shards have "
                    f"{capacity.num_blocks}"
                )
            self._room = room
        return info


class _Run:
    """The replay of one epoch."""

    def __init__(
        self, shards: StepChannel, epoch: Epoch, *, is_exact: bool, step_seconds: float
    ) -> None:
        header = epoch.header
        self.outcome = Outcome(epoch=epoch, is_compared=header.keeps_tokens)
        self.step = 0
        """The last step of the record whose answer was read."""
        self._shards = shards
        self._header = header
        self._step_seconds = step_seconds
        self._comparison = Comparison(is_exact=is_exact)
        self._rebuild: Rebuild | None = None
        self._number = 0
        self._flights: deque[Sequence[pb.Sequence]] = deque()
        """Sequences admitted by each recorded step that is sent and not compared."""
        self._early: deque[pb.StepResponse] = deque()
        """Answers to the first of those steps that were read ahead."""

    async def play(self) -> None:
        outcome = self.outcome
        snapshot = outcome.epoch.snapshot
        self.step = 0 if snapshot is None else snapshot.number
        for event in settled(outcome.epoch.events, after=-1 if snapshot is None else self.step):
            if isinstance(event, AdapterChanged):
                await self._change_adapter(event)
                continue
            if snapshot is not None:
                # The adapters of its sequences have come by now.
                await self._restore(snapshot)
                snapshot = None
            if isinstance(event, Failed):
                outcome.failure = event
            elif isinstance(event, Unanswered):
                outcome.unanswered = event.numbers
            elif outcome.difference is not None:
                break
            elif isinstance(event, Sent):
                await self._send(event.message)
            else:
                await self._compare(event.answer)
        if snapshot is not None:
            await self._restore(snapshot)
        outcome.largest_gap = self._comparison.largest_gap

    async def _change_adapter(self, event: AdapterChanged) -> None:
        shards, timeout = self._shards, self._step_seconds
        if event.digest is None:
            await shards.unload_adapter(event.slot, timeout=timeout)
        else:
            await shards.load_adapter(event.slot, event.digest, timeout=timeout)

    async def _restore(self, snapshot: pb.StepRequest) -> None:
        header = self._header
        self._rebuild = rebuild = Rebuild(
            block_size=header.shard.block_size,
            max_tokens=header.warmup.get("max_batch_prefill_tokens", header.shard.block_size),
        )
        self._fill_in(snapshot)
        for restored in sequences_of(snapshot):
            self._comparison.restore(restored.sequence, restored.num_inputs)
            for message in rebuild.restore(restored):
                answer = await self._compute(message)
                if self.outcome.is_compared and self.outcome.difference is None:
                    self.outcome.difference = self._comparison.restored(self.step, answer)

    async def _send(self, recorded: pb.StepRequest) -> None:
        if recorded.HasField("open"):
            return
        message = pb.StepRequest()
        message.CopyFrom(recorded)
        self._fill_in(message)
        if self._rebuild is not None:
            for other in self._rebuild.missing(message):
                await self._compute(other)
        self._flights.append((*message.prefill.change.admitted, *message.decode.change.admitted))
        await self._write(message)

    async def _compare(self, recorded: pb.StepResponse) -> None:
        if not recorded.number:
            return
        self.step = recorded.number
        answer = self._early.popleft() if self._early else await self._read()
        for sequence in self._flights.popleft():
            self._comparison.admit(sequence)
        outcome = self.outcome
        outcome.num_steps += 1
        outcome.num_tokens += sum(recorded.counts)
        outcome.recorded_ns += recorded.timings.total_ns
        outcome.replayed_ns += answer.timings.total_ns
        if outcome.is_compared:
            outcome.difference = self._comparison.answered(recorded, answer)

    async def _compute(self, message: pb.StepRequest) -> pb.StepResponse:
        """Run a step that is not in the record, after all answers in flight are read."""
        while len(self._early) < len(self._flights):
            self._early.append(await self._read())
        await self._write(message)
        return await self._read()

    async def _write(self, message: pb.StepRequest) -> None:
        self._number += 1
        message.epoch, message.number = self._shards.epoch, self._number
        await self._shards.write(message)

    async def _read(self) -> pb.StepResponse:
        try:
            async with asyncio.timeout(self._step_seconds):
                return (await self._shards.read())[0]
        except TimeoutError:
            raise ShardHung(f"no answer in {self._step_seconds:g} seconds") from None

    def _fill_in(self, message: pb.StepRequest) -> None:
        if not self._header.keeps_tokens:
            fill_in(message, self._header.shard.vocab_size)


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Steps without an answer in the record, at the end of an epoch."""

    numbers: tuple[int, ...]


def settled(events: Iterable[Happened], *, after: int) -> Iterator[Happened | Unanswered]:
    """`events` in order, without unanswered messages; their numbers come last.

    `after` is the number of the last answer before `events`, or -1. At most the events between a message and its
    answer are held back.
    """
    held: deque[Happened] = deque()
    for event in events:
        held.append(event)
        if isinstance(event, Answered):
            after = event.answer.number
        while held and not _waits(held[0], after):
            yield held.popleft()
    yield from (event for event in held if not _waits(event, after))
    numbers = tuple(
        event.message.number for event in held if isinstance(event, Sent) and _waits(event, after)
    )
    if numbers:
        yield Unanswered(numbers)


def _waits(event: Happened, answered: int) -> bool:
    return isinstance(event, Sent) and event.message.number > answered


def _is_exact(header: Header, info: ShardInfo) -> bool:
    """Whether these shards must compute the same bits as the recorded ones."""
    return header.shard.deterministic and all(
        getattr(header.shard, name) == getattr(info, name) for name in REPORTED
    )
