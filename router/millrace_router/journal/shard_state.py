"""What the shards hold, followed from the messages alone, so that a journal file can begin in the middle of an epoch.

A snapshot is a StepRequest whose `number` is the last step answered and whose Prefill reads: `admitted` are the live
sequences with every token known so far, `grown_*` their block tables, `chunk_tokens` how many KV positions of each are
filled, `decode_slots` those whose prompt is finished.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from millrace_proto import generate_pb2 as pb

IDS = "I"
"""Type code of token ids in arrays."""


@dataclass(slots=True)
class Life:
    """A sequence in a slot."""

    sequence: pb.Sequence
    """As it was admitted; never changed."""
    num_pending: int
    """Tokens known whose KV is not computed: what is left of the prompt, and those emitted last."""
    emitted: array[int] = field(default_factory=lambda: array(IDS))
    """Tokens since it was admitted."""
    blocks: list[int] = field(default_factory=list)

    @property
    def computed(self) -> int:
        """KV positions filled, cached ones included."""
        return len(self.sequence.input_ids) + len(self.emitted) - self.num_pending

    @property
    def decodes(self) -> bool:
        """Whether its prompt is computed."""
        return self.num_pending <= len(self.emitted)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the shards held after a step, and what had been sent and not answered by then."""

    epoch: int
    number: int
    """Of the last step answered."""
    lives: tuple[Life, ...]
    pending: tuple[pb.StepRequest, ...]

    def message(self) -> pb.StepRequest:
        """As the StepRequest described above; takes milliseconds when there is much text."""
        message = pb.StepRequest(epoch=self.epoch, number=self.number)
        prefill = message.prefill
        change = prefill.change
        for life in self.lives:
            slot = life.sequence.slot
            sequence = change.admitted.add()
            sequence.CopyFrom(life.sequence)
            sequence.input_ids.extend(life.emitted)
            sequence.generated_tokens += len(life.emitted)
            sequence.cached_tokens = 0
            change.grown_slots.extend([slot] * len(life.blocks))
            change.grown_blocks.extend(life.blocks)
            prefill.chunk_slots.append(slot)
            prefill.chunk_tokens.append(life.computed)
            if life.decodes:
                prefill.decode_slots.append(slot)
        return message


class ShardState:
    """Every live sequence by slot, as of the last step answered."""

    def __init__(self) -> None:
        self.epoch = 0
        """0 between epochs."""
        self.number = 0
        self._lives: dict[int, Life] = {}
        self._append: dict[int, Callable[[int], None]] = {}
        """Adds a token to what a slot's sequence has emitted."""
        self._pending: deque[pb.StepRequest] = deque()
        self._failed: set[int] = set()

    @property
    def unanswered(self) -> list[int]:
        """Numbers of the steps in flight."""
        return [message.number for message in self._pending]

    @property
    def is_restorable(self) -> bool:
        """Whether a snapshot would say it all.

        What a sequence that failed holds cannot be computed again, and what has not been opened holds nothing.
        """
        is_opening = bool(self._pending) and self._pending[0].HasField("open")
        return not is_opening and self._failed.isdisjoint(self._lives)

    def end_epoch(self) -> None:
        """Forget everything; the shards will as well."""
        self.epoch = self.number = 0
        self._lives.clear()
        self._append.clear()
        self._pending.clear()
        self._failed.clear()

    def sent(self, message: pb.StepRequest) -> None:
        """Expect an answer to `message`."""
        self.epoch = message.epoch
        self._pending.append(message)

    def answered(self, answer: pb.StepResponse) -> None:
        """The oldest step in flight has been done.

        Raises:
            ValueError: it is another one, or its columns contradict each other.
            KeyError: it names a slot that is empty.

        """
        message = self._pending.popleft()
        if (message.epoch, message.number) != (answer.epoch, answer.number):
            raise ValueError(f"step {answer.number} is answered instead of {message.number}")
        self.number = message.number
        work = message.WhichOneof("work")
        if work == "filter_batch":
            self._drop(message.filter_batch.dropped_slots)
        elif work == "prefill":
            self._change(message.prefill.change)
            prefill = message.prefill
            for slot, count in zip(prefill.chunk_slots, prefill.chunk_tokens, strict=True):
                self._lives[slot].num_pending -= count
            self._computed(prefill.decode_slots, answer)
        elif work == "decode":
            self._change(message.decode.change)
            decodes = message.decode.decode_slots
            if len(answer.ids) == len(decodes) and set(answer.counts) == {1}:
                self._decoded(answer)
            else:
                self._computed(decodes, answer)

    def snapshot(self) -> Snapshot:
        """A copy as of now; copies no more than the tokens emitted and the blocks."""
        lives = (
            Life(life.sequence, life.num_pending, life.emitted[:], life.blocks[:])
            for life in self._lives.values()
        )
        return Snapshot(self.epoch, self.number, tuple(lives), tuple(self._pending))

    def _drop(self, slots: Iterable[int]) -> None:
        for slot in slots:
            del self._lives[slot], self._append[slot]
            self._failed.discard(slot)

    def _change(self, change: pb.BatchChange) -> None:
        self._drop(change.dropped_slots)
        for sequence in change.admitted:
            life = Life(sequence, len(sequence.input_ids) - sequence.cached_tokens)
            self._lives[sequence.slot] = life
            self._append[sequence.slot] = life.emitted.append
        for slot, block in zip(change.grown_slots, change.grown_blocks, strict=True):
            self._lives[slot].blocks.append(block)

    def _decoded(self, answer: pb.StepResponse) -> None:
        """Every row has computed a token and emitted one, as nearly always: as many are pending as before."""
        append = self._append
        for slot, id_ in zip(answer.slots, answer.ids, strict=True):
            append[slot](id_)
        if answer.computed_slots:
            self._positions(answer)

    def _computed(self, decodes: Iterable[int], answer: pb.StepResponse) -> None:
        lives = self._lives
        for slot in decodes:
            lives[slot].num_pending -= 1
        ids = iter(answer.ids)
        for slot, count in zip(answer.slots, answer.counts, strict=True):
            lives[slot].emitted.extend(islice(ids, count))
            lives[slot].num_pending += count
        self._positions(answer)
        self._failed.update(answer.failed_slots)

    def _positions(self, answer: pb.StepResponse) -> None:
        """Rows that were allowed several positions say how many they have filled."""
        for slot, computed in zip(answer.computed_slots, answer.computed_positions, strict=True):
            life = self._lives[slot]
            life.num_pending += life.computed - computed
