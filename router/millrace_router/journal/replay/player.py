"""Sends the steps of a journal to shards, in order and with as many steps in flight as recorded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import takewhile

from millrace_proto import generate_pb2 as pb
from millrace_router.journal.frames import JournalUnusable
from millrace_router.journal.header import Header
from millrace_router.journal.reader import (
    AdapterChanged,
    Answered,
    Epoch,
    Event,
    Failed,
    ImagePut,
    Sent,
)
from millrace_router.journal.replay.comparison import Comparison, Difference
from millrace_router.request.images import PreparedImage
from millrace_router.shards.errors import ShardError
from millrace_router.shards.step_channel import StepChannel
from millrace_router.shards.wire import ShardInfo

REQUIRED_EQUAL = ("model_type", "vocab_size", "block_size")
"""Properties that must be equal to the recorded shards'."""
REPORTED = (
    "dtype",
    "kv_cache_dtype",
    "quantize_activations",
    "device_type",
    "attention",
    "operators",
    "world_size",
    "deterministic",
    "max_draft_tokens",
)
"""Properties that may explain other answers."""

GREY = b"\x80"
_MASK = (1 << 64) - 1


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
    num_left_out: int = 0
    """Requests with images, which are not compared."""
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
        self._last: Outcome | None = None
        self._computed: set[int] = set()
        """Blocks that the shards hold as recorded, since epochs that follow each other were replayed."""

    async def play(self, epoch: Epoch) -> Outcome:
        """Replay an epoch up to its end or the first difference.

        If it began with KV of an earlier epoch that was not replayed right before, that KV is computed first.

        Raises:
            JournalUnusable: the shards do not match the record.
            ShardError: the epoch cannot begin.

        """
        info = await self._prepare(epoch.header)
        await self._shards.open()
        run = _Run(
            self._shards,
            epoch,
            info,
            is_exact=_is_exact(epoch.header, info),
            step_seconds=self._step_seconds,
        )
        last, self._last = self._last, run.outcome
        is_right = last is not None and last.difference is None and epoch.header.keeps_tokens
        if last is None or not is_right or last.epoch.index + 1 != epoch.index:
            self._computed.clear()
        run.computed = self._computed
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
                state_pages=header.capacity.state_pages or None,
                feature_rows=header.capacity.feature_rows or None,
                window_blocks=[each.num_blocks for each in header.capacity.window_groups],
            )
            if capacity.num_blocks != header.capacity.num_blocks:
                raise JournalUnusable(
                    f"recorded with {header.capacity.num_blocks} blocks, but these shards have "
                    f"{capacity.num_blocks}"
                )
            self._room, self._last = room, None
        return info


class _Run:
    """The replay of one epoch."""

    def __init__(
        self,
        shards: StepChannel,
        epoch: Epoch,
        info: ShardInfo,
        *,
        is_exact: bool,
        step_seconds: float,
    ) -> None:
        header = epoch.header
        self._vision = info.vision
        self.outcome = Outcome(epoch=epoch, is_compared=header.keeps_tokens)
        self.step = 0
        """The last step of the record whose answer was read."""
        self._shards = shards
        self._header = header
        self._step_seconds = step_seconds
        self._comparison = Comparison(is_exact=is_exact)
        self._number = 0
        self._flights: deque[Sequence[pb.Sequence]] = deque()
        """Sequences admitted by each recorded step that is sent and not compared."""
        self._early: deque[pb.StepResponse] = deque()
        """Answers to the first of them that were read before their turn."""
        self._seeing: set[int] = set()
        """Slots of sequences with images."""
        self.computed: set[int] = set()
        """Blocks with the recorded KV."""

    async def play(self) -> None:
        outcome = self.outcome
        for event in settled(outcome.epoch.events):
            if isinstance(event, AdapterChanged):
                await self._change_adapter(event)
            elif isinstance(event, ImagePut):
                await self._put_image(event)
            elif isinstance(event, Failed):
                outcome.failure = event
            elif isinstance(event, Unanswered):
                outcome.unanswered = event.numbers
            elif outcome.difference is not None:
                break
            elif isinstance(event, Sent):
                await self._send(event.message)
            else:
                await self._compare(event.answer)
        outcome.largest_gap = self._comparison.largest_gap

    async def _change_adapter(self, event: AdapterChanged) -> None:
        shards, timeout = self._shards, self._step_seconds
        if event.digest is None:
            await shards.unload_adapter(event.slot, timeout=timeout)
        else:
            await shards.load_adapter(event.slot, event.digest, timeout=timeout)

    async def _put_image(self, event: ImagePut) -> None:
        """Put a grey image where the recorded one was, whose pixels no journal has."""
        vision = self._vision
        if vision is None:
            raise JournalUnusable("recorded with images, but these shards read only text")
        height, width = event.height or vision.tile_height, event.width or vision.tile_width
        image = PreparedImage(
            digest=sha256(f"{event.slot} {event.time_ns}".encode()).digest(),
            rows=event.num_tiles - 1,
            columns=1,
            num_tiles=event.num_tiles,
            height=height,
            width=width,
            rows_per_tile=vision.rows_of_tile(height, width),
            pixels=GREY * (event.num_tiles * 3 * height * width),
        )
        await self._shards.put_image(event.slot, event.first_row, image, timeout=self._step_seconds)

    def _has_images(self, sequence: pb.Sequence) -> bool:
        """Return whether images are in a sequence; those that were cached are not named, but have placeholders."""
        if sequence.images:
            return True
        vision = self._vision
        return vision is not None and vision.image_token_id in sequence.input_ids

    async def _send(self, recorded: pb.StepRequest) -> None:
        if recorded.HasField("open"):
            return
        message = pb.StepRequest()
        message.CopyFrom(recorded)
        if not self._header.keeps_tokens:
            fill_in(message, self._header.shard.vocab_size)
        admitted = (*recorded.prefill.change.admitted, *recorded.decode.change.admitted)
        if admitted:
            await self._compute_kept(message)
        self.computed.update(recorded.prefill.change.grown_blocks)
        self.computed.update(recorded.decode.change.grown_blocks)
        self._flights.append(admitted)
        for sequence in admitted:
            self._seeing.discard(sequence.slot)
            if self._has_images(sequence):
                self._seeing.add(sequence.slot)
        if self._seeing:
            self._take_drafts(message.decode)
        await self._write(message)

    def _take_drafts(self, step: pb.Decode) -> None:
        """Let sequences with images fill a position a step: with more right drafts than recorded they lack blocks."""
        for index, slot in enumerate(step.decode_slots[: len(step.decode_tokens)]):
            if slot in self._seeing:
                step.decode_tokens[index] = 1
                if step.draft_tokens:
                    step.draft_tokens[index] = 0

    async def _write(self, message: pb.StepRequest) -> None:
        self._number += 1
        message.epoch, message.number = self._shards.epoch, self._number
        await self._shards.write(message)

    async def _compute_kept(self, message: pb.StepRequest) -> None:
        """Let the sequences of `message` join before it and compute their cached tokens whose blocks are not there."""
        size = self._header.shard.block_size
        change = (message.prefill if message.HasField("prefill") else message.decode).change
        for sequence in list(change.admitted):
            blocks = blocks_of(change, sequence.slot)
            known = takewhile(
                self.computed.__contains__, blocks[: -(-sequence.cached_tokens // size)]
            )
            num_known = min(sum(size for _ in known), sequence.cached_tokens)
            if num_known == sequence.cached_tokens:
                continue
            while len(self._early) < len(self._flights):
                self._early.append(await self._read())
            most = self._header.warmup.get("max_batch_prefill_tokens", size)
            for fill in fills(change, sequence, num_known, most=most):
                await self._write(fill)
                await self._read()
            self.computed.update(blocks)

    async def _compare(self, recorded: pb.StepResponse) -> None:
        if not recorded.number:
            return
        self.step = recorded.number
        answer = self._early.popleft() if self._early else await self._read()
        for sequence in self._flights.popleft():
            has_images = self._has_images(sequence)
            self._comparison.admit(sequence, is_compared=not has_images)
            self.outcome.num_left_out += has_images
        outcome = self.outcome
        outcome.num_steps += 1
        outcome.num_tokens += sum(recorded.counts)
        outcome.recorded_ns += recorded.timings.total_ns
        outcome.replayed_ns += answer.timings.total_ns
        if outcome.is_compared:
            outcome.difference = self._comparison.answered(recorded, answer)

    async def _read(self) -> pb.StepResponse:
        answers = await self._shards.group.while_computing(
            self._shards.read(), "the shard does not go on"
        )
        return answers[0]


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Steps without an answer in the record, at the end of an epoch."""

    numbers: tuple[int, ...]


def settled(events: Iterable[Event]) -> Iterator[Event | Unanswered]:
    """`events` in order, without unanswered messages; their numbers come last.

    At most the events between a message and its answer are held back.
    """
    held: deque[Event] = deque()
    after = -1
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


def _waits(event: Event, answered: int) -> bool:
    return isinstance(event, Sent) and event.message.number > answered


def blocks_of(change: pb.BatchChange, slot: int) -> list[int]:
    """The blocks by which `change` grows the table of `slot`, in order."""
    grown = zip(change.grown_slots, change.grown_blocks, strict=True)
    return [block for owner, block in grown if owner == slot]


def fills(
    change: pb.BatchChange, sequence: pb.Sequence, num_known: int, *, most: int
) -> Iterator[pb.StepRequest]:
    """Yield steps that admit `sequence` and compute its cached tokens after `num_known`, up to `most` in each.

    The sequence, its blocks and the dropped slots are taken out of `change`, whose step follows.
    """
    slot, num_cached = sequence.slot, sequence.cached_tokens
    step, moved = pb.StepRequest(), pb.BatchChange(dropped_slots=change.dropped_slots)
    moved.admitted.add().CopyFrom(sequence)
    moved.admitted[0].cached_tokens = num_known
    change.admitted.remove(sequence)
    grown = list(zip(change.grown_slots, change.grown_blocks, strict=True))
    del change.dropped_slots[:], change.grown_slots[:], change.grown_blocks[:]
    for owner, block in grown:
        to = moved if owner == slot else change
        to.grown_slots.append(owner)
        to.grown_blocks.append(block)
    step.prefill.change.CopyFrom(moved)
    for start in range(num_known, num_cached, most):
        step.prefill.chunk_slots[:] = [slot]
        step.prefill.chunk_tokens[:] = [min(most, num_cached - start)]
        yield step
        step.prefill.ClearField("change")


def _is_exact(header: Header, info: ShardInfo) -> bool:
    """Return whether these shards must compute the same bits as the recorded ones."""
    return header.shard.deterministic and all(
        getattr(header.shard, name) == getattr(info, name) for name in REPORTED
    )


def token_at(position: int, vocab_size: int) -> int:
    """Return the id at a position, the same for every sequence, so that cached blocks match.

    The ids come from splitmix64, so that no draft token is right.
    """
    value = (position + 1) * 0x9E3779B97F4A7C15 & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return (value ^ value >> 31) % vocab_size


def fill_in(message: pb.StepRequest, vocab_size: int) -> None:
    """Give every admitted sequence ids where the journal has none, and remove the fields that depend on them.

    Rules that name tokens are removed, and so are grammars, because their sources are unknown. Rows of several
    positions are removed with grammars and draft tokens: with more right draft tokens than in the record, a row would
    need further blocks.
    """
    work = message.WhichOneof("work")
    if work not in {"prefill", "decode"}:
        return
    step = message.prefill if work == "prefill" else message.decode
    step.ClearField("decode_tokens")
    step.ClearField("draft_tokens")
    for sequence in step.change.admitted:
        count = len(sequence.input_ids)
        del sequence.input_ids[:]
        sequence.input_ids.extend(token_at(position, vocab_size) for position in range(count))
        bias_ids = sequence.parameters.bias_ids
        num_biases = len(bias_ids)
        del bias_ids[:]
        bias_ids.extend(range(num_biases))
        sequence.ClearField("grammar")
        parameters = sequence.parameters
        for ids in (parameters.allowed_ids, parameters.bad_word_ids, parameters.stop_ids):
            del ids[:]
        del parameters.bad_word_lengths[:]
