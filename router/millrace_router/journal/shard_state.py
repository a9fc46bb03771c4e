"""The state of the shards, derived from the messages, so that a journal file can begin in the middle of an epoch.

A snapshot is a StepRequest. Its `number` is that of the last answered step. In its Prefill, `admitted` has the live
sequences with all known tokens, `grown_*` their block tables, `chunk_tokens` the number of filled KV positions of
each, and `decode_slots` the sequences whose prompt is complete.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from millrace_proto import generate_pb2 as pb

IDS = "I"
"""Type code of token ids in arrays."""


@dataclass(slots=True)
class LiveSequence:
    """A sequence in a slot."""

    sequence: pb.Sequence
    """The sequence at its admission; not changed."""
    num_pending: int
    """Known tokens whose KV is not computed: the rest of the prompt, and the last emitted tokens."""
    emitted: array[int] = field(default_factory=lambda: array(IDS))
    """Tokens emitted since the admission."""
    blocks: list[int] = field(default_factory=list)

    @property
    def computed(self) -> int:
        """Filled KV positions, cached ones included."""
        return len(self.sequence.input_ids) + len(self.emitted) - self.num_pending

    @property
    def decodes(self) -> bool:
        """Whether the prompt is complete."""
        return self.num_pending <= len(self.emitted)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of the shards after a step, and the unanswered messages at that time."""

    epoch: int
    number: int
    """Number of the last answered step."""
    sequences: tuple[LiveSequence, ...]
    pending: tuple[pb.StepRequest, ...]
    adapters: Mapping[int, str] = field(default_factory=dict)
    """Digests by adapter slot."""

    def message(self) -> pb.StepRequest:
        """The StepRequest described above; takes milliseconds for long texts."""
        message = pb.StepRequest(epoch=self.epoch, number=self.number)
        prefill = message.prefill
        change = prefill.change
        for live in self.sequences:
            slot = live.sequence.slot
            sequence = change.admitted.add()
            sequence.CopyFrom(live.sequence)
            sequence.input_ids.extend(live.emitted)
            sequence.generated_tokens += len(live.emitted)
            sequence.cached_tokens = 0
            change.grown_slots.extend([slot] * len(live.blocks))
            change.grown_blocks.extend(live.blocks)
            prefill.chunk_slots.append(slot)
            prefill.chunk_tokens.append(live.computed)
            if live.decodes:
                prefill.decode_slots.append(slot)
        return message


class ShardState:
    """The live sequences by slot, after the last answered step."""

    def __init__(self) -> None:
        self.epoch = 0
        """The current epoch; 0 between epochs."""
        self.number = 0
        self._live: dict[int, LiveSequence] = {}
        self._append: dict[int, Callable[[int], None]] = {}
        """Functions that append a token to the emitted tokens of a slot."""
        self._pending: deque[pb.StepRequest] = deque()
        self._failed: set[int] = set()
        self._adapters: dict[int, str] = {}

    @property
    def unanswered(self) -> list[int]:
        """Numbers of the steps in flight."""
        return [message.number for message in self._pending]

    @property
    def is_restorable(self) -> bool:
        """Whether a snapshot would be complete.

        The KV of a failed sequence cannot be computed again, and an epoch that is not open has no state.
        """
        is_opening = bool(self._pending) and self._pending[0].HasField("open")
        return not is_opening and self._failed.isdisjoint(self._live)

    def end_epoch(self) -> None:
        """Clear the state, as the shards do."""
        self.epoch = self.number = 0
        self._live.clear()
        self._append.clear()
        self._pending.clear()
        self._failed.clear()
        self._adapters.clear()

    def adapter_changed(self, slot: int, digest: str | None) -> None:
        """Record the adapter that the shards have in a slot of theirs; None: none."""
        self._adapters.pop(slot, None)
        if digest is not None:
            self._adapters[slot] = digest

    def sent(self, message: pb.StepRequest) -> None:
        """Record a message to the shards."""
        self.epoch = message.epoch
        self._pending.append(message)

    def answered(self, answer: pb.StepResponse) -> None:
        """Apply the oldest unanswered step.

        Raises:
            ValueError: the answer is to another step, or its columns contradict each other.
            KeyError: the step names an empty slot.

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
                self._live[slot].num_pending -= count
            self._computed(prefill.decode_slots, answer)
        elif work == "decode":
            self._change(message.decode.change)
            decodes = message.decode.decode_slots
            if len(answer.ids) == len(decodes) and set(answer.counts) == {1}:
                self._decoded(answer)
            else:
                self._computed(decodes, answer)

    def snapshot(self) -> Snapshot:
        """A copy of the current state; copies only emitted tokens and blocks."""
        sequences = (
            LiveSequence(live.sequence, live.num_pending, live.emitted[:], live.blocks[:])
            for live in self._live.values()
        )
        return Snapshot(
            self.epoch,
            self.number,
            tuple(sequences),
            tuple(self._pending),
            dict(self._adapters),
        )

    def _drop(self, slots: Iterable[int]) -> None:
        for slot in slots:
            del self._live[slot], self._append[slot]
            self._failed.discard(slot)

    def _change(self, change: pb.BatchChange) -> None:
        self._drop(change.dropped_slots)
        for sequence in change.admitted:
            live = LiveSequence(sequence, len(sequence.input_ids) - sequence.cached_tokens)
            self._live[sequence.slot] = live
            self._append[sequence.slot] = live.emitted.append
        for slot, block in zip(change.grown_slots, change.grown_blocks, strict=True):
            self._live[slot].blocks.append(block)

    def _decoded(self, answer: pb.StepResponse) -> None:
        """Apply the usual step: every row computed a token and emitted one, so as many tokens are pending as before."""
        append = self._append
        for slot, id_ in zip(answer.slots, answer.ids, strict=True):
            append[slot](id_)
        if answer.computed_slots:
            self._positions(answer)

    def _computed(self, decodes: Iterable[int], answer: pb.StepResponse) -> None:
        sequences = self._live
        for slot in decodes:
            sequences[slot].num_pending -= 1
        ids = iter(answer.ids)
        for slot, count in zip(answer.slots, answer.counts, strict=True):
            sequences[slot].emitted.extend(islice(ids, count))
            sequences[slot].num_pending += count
        self._positions(answer)
        self._failed.update(answer.failed_slots)

    def _positions(self, answer: pb.StepResponse) -> None:
        """Apply the filled positions of rows that were allowed several."""
        for slot, computed in zip(answer.computed_slots, answer.computed_positions, strict=True):
            live = self._live[slot]
            live.num_pending += live.computed - computed
