"""Restores the state of the shards in the middle of an epoch by computing it again, as after a preemption."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from millrace_proto import generate_pb2 as pb
from millrace_router.journal.errors import JournalDamaged


@dataclass(frozen=True, slots=True)
class Restored:
    """A live sequence of a snapshot."""

    sequence: pb.Sequence
    """The sequence with all tokens known at that time."""
    blocks: Sequence[int]
    computed: int
    """Filled KV positions."""
    decodes: bool

    @property
    def num_inputs(self) -> int:
        """Tokens of its admission; for a decoding sequence those with KV, because the others are sampled again."""
        return self.computed if self.decodes else len(self.sequence.input_ids)


class Rebuild:
    """Makes messages that are not in the record, and that compute the KV which the record assumes.

    Each must be answered before the next. Cached blocks may be older than the record too: when a sequence that shares
    them is admitted, another sequence in its slot fills them first and is dropped again.
    """

    def __init__(self, *, block_size: int, max_tokens: int) -> None:
        """A step may compute `max_tokens` of a prompt."""
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._filled: set[int] = set()
        """Blocks that are computed, or will be before they are shared."""

    def restore(self, restored: Restored) -> Iterator[pb.StepRequest]:
        """Admit a sequence and compute its KV; sequences come in order of `computed`.

        A decoding sequence samples the tokens after its inputs again in the last step. Raises JournalDamaged.
        """
        sequence = pb.Sequence()
        sequence.CopyFrom(restored.sequence)
        num_left = len(sequence.input_ids) - restored.num_inputs
        if num_left:
            del sequence.input_ids[restored.num_inputs :]
            sequence.generated_tokens -= num_left
            sequence.prefill_logprobs = False
        # At least one position is left to compute, and the blocks before a filled block must be filled too.
        shareable = restored.blocks[: (restored.computed - 1) // self._block_size]
        shared = [i + 1 for i, block in enumerate(shareable) if block in self._filled]
        num_shared = max(shared, default=0)
        dropped: list[int] = []
        yield from self._fill(sequence, shareable[:num_shared], dropped)
        sequence.cached_tokens = num_shared * self._block_size
        self._filled.update(restored.blocks)
        yield from self._steps(sequence, restored.blocks, restored.computed, dropped)

    def missing(self, message: pb.StepRequest) -> Iterator[pb.StepRequest]:
        """Fill the cached blocks of the sequences that `message` admits; changes `message` to follow these steps."""
        work = message.WhichOneof("work")
        if work not in {"prefill", "decode"}:
            return
        change = message.prefill.change if work == "prefill" else message.decode.change
        tables = tables_of(change)
        for sequence in change.admitted:
            num_shared = sequence.cached_tokens // self._block_size
            dropped = [slot for slot in change.dropped_slots if slot == sequence.slot]
            is_filled = False
            for filler in self._fill(sequence, tables.get(sequence.slot, [])[:num_shared], dropped):
                is_filled = True
                yield filler
            if is_filled and sequence.slot not in change.dropped_slots:
                change.dropped_slots.append(sequence.slot)
        self._filled.update(change.grown_blocks)

    def _fill(
        self, sequence: pb.Sequence, blocks: Sequence[int], dropped: list[int]
    ) -> Iterator[pb.StepRequest]:
        """Fill the unfilled ones of `blocks`, the first blocks of `sequence`.

        The first message drops the slots `dropped`; afterwards `dropped` has the slots for the next message to drop.
        """
        for start, end in _runs(block in self._filled for block in blocks):
            filler = pb.Sequence(
                slot=sequence.slot,
                request_id=sequence.request_id,
                input_ids=sequence.input_ids[: end * self._block_size + 1],
                cached_tokens=start * self._block_size,
                parameters=sequence.parameters,
                adapter_slot=sequence.adapter_slot,
            )
            yield from self._steps(filler, blocks[:end], end * self._block_size, dropped)
            dropped[:] = [sequence.slot]
        self._filled.update(blocks)

    def _steps(
        self, sequence: pb.Sequence, blocks: Sequence[int], computed: int, dropped: Iterable[int]
    ) -> Iterator[pb.StepRequest]:
        """Admit `sequence` and compute its first `computed` positions."""
        position = sequence.cached_tokens
        if not position < computed <= len(sequence.input_ids):
            raise JournalDamaged(f"request {sequence.request_id} has nothing to compute")
        while position < computed:
            message = pb.StepRequest()
            prefill = message.prefill
            if position == sequence.cached_tokens:
                prefill.change.dropped_slots.extend(dropped)
                prefill.change.admitted.append(sequence)
                prefill.change.grown_slots.extend([sequence.slot] * len(blocks))
                prefill.change.grown_blocks.extend(blocks)
            count = min(self._max_tokens, computed - position)
            prefill.chunk_slots.append(sequence.slot)
            prefill.chunk_tokens.append(count)
            position += count
            yield message


def _runs(is_filled: Iterable[bool]) -> list[tuple[int, int]]:
    """(start, end) of each run of unfilled blocks."""
    runs: list[tuple[int, int]] = []
    for filled, group in groupby(enumerate(is_filled), key=itemgetter(1)):
        indexes = [index for index, _ in group]
        if not filled:
            runs.append((indexes[0], indexes[-1] + 1))
    return runs


def tables_of(change: pb.BatchChange) -> dict[int, list[int]]:
    """The blocks that each slot grows by, in order."""
    tables: dict[int, list[int]] = {}
    for slot, block in zip(change.grown_slots, change.grown_blocks, strict=True):
        tables.setdefault(slot, []).append(block)
    return tables


def sequences_of(snapshot: pb.StepRequest) -> list[Restored]:
    """The sequences of a snapshot, the shortest first, so that blocks are filled before they are shared."""
    prefill = snapshot.prefill
    tables = tables_of(prefill.change)
    computed = dict(zip(prefill.chunk_slots, prefill.chunk_tokens, strict=True))
    decoding = set(prefill.decode_slots)
    found = [
        Restored(each, tables.get(each.slot, []), computed[each.slot], each.slot in decoding)
        for each in prefill.change.admitted
    ]
    return sorted(found, key=lambda restored: restored.computed)
