"""The way back into the middle of an epoch: what the shards held then is computed again, as after a preemption."""

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
    """With every token known at the time."""
    blocks: Sequence[int]
    computed: int
    """KV positions that were filled."""
    decodes: bool

    @property
    def num_inputs(self) -> int:
        """Tokens it is admitted with; of one that decodes, those whose KV was there: the others are chosen again."""
        return self.computed if self.decodes else len(self.sequence.input_ids)


class Rebuild:
    """Messages that are not in the record, and compute what it takes for granted.

    Each has to be answered before the next. Cached blocks may be older than the record as well: they are filled when a
    sequence is admitted that shares them, by another one in its slot, which is dropped again.
    """

    def __init__(self, *, block_size: int, most_tokens: int) -> None:
        """A step may compute `most_tokens` of a prompt."""
        self._block_size = block_size
        self._most_tokens = most_tokens
        self._filled: set[int] = set()
        """Blocks whose contents were computed since, or will be by the time they are shared."""

    def restore(self, restored: Restored) -> Iterator[pb.StepRequest]:
        """Admit a sequence and compute what it had; sequences come by `computed`, the shortest first.

        One that decodes chooses the tokens after its inputs again in the last of these steps. Raises JournalDamaged.
        """
        sequence = pb.Sequence()
        sequence.CopyFrom(restored.sequence)
        num_left = len(sequence.input_ids) - restored.num_inputs
        if num_left:
            del sequence.input_ids[restored.num_inputs :]
            sequence.generated_tokens -= num_left
            sequence.prefill_logprobs = False
        # One position at least is left to compute, and what has one in use behind it has to be there too.
        shareable = restored.blocks[: (restored.computed - 1) // self._block_size]
        shared = [i + 1 for i, block in enumerate(shareable) if block in self._filled]
        num_shared = max(shared, default=0)
        dropped: list[int] = []
        yield from self._fill(sequence, shareable[:num_shared], dropped)
        sequence.cached_tokens = num_shared * self._block_size
        self._filled.update(restored.blocks)
        yield from self._steps(sequence, restored.blocks, restored.computed, dropped)

    def missing(self, message: pb.StepRequest) -> Iterator[pb.StepRequest]:
        """Fill the cached blocks of those whom `message` admits, which is changed to come after that."""
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
        """Fill those of `blocks`, the first that `sequence` has, which nobody has filled.

        The first message drops the slots `dropped`, which then names what the next one has to drop.
        """
        for start, end in _runs(block in self._filled for block in blocks):
            filler = pb.Sequence(
                slot=sequence.slot,
                request_id=sequence.request_id,
                input_ids=sequence.input_ids[: end * self._block_size + 1],
                cached_tokens=start * self._block_size,
                parameters=sequence.parameters,
            )
            yield from self._steps(filler, blocks[:end], end * self._block_size, dropped)
            dropped[:] = [sequence.slot]
        self._filled.update(blocks)

    def _steps(
        self, sequence: pb.Sequence, blocks: Sequence[int], computed: int, dropped: Iterable[int]
    ) -> Iterator[pb.StepRequest]:
        """Admit `sequence` and compute its prompt as far as `computed`."""
        position = sequence.cached_tokens
        if not position < computed <= len(sequence.input_ids):
            raise JournalDamaged(f"request {sequence.request_id} has nothing to be computed")
        while position < computed:
            message = pb.StepRequest()
            prefill = message.prefill
            if position == sequence.cached_tokens:
                prefill.change.dropped_slots.extend(dropped)
                prefill.change.admitted.append(sequence)
                prefill.change.grown_slots.extend([sequence.slot] * len(blocks))
                prefill.change.grown_blocks.extend(blocks)
            count = min(self._most_tokens, computed - position)
            prefill.chunk_slots.append(sequence.slot)
            prefill.chunk_tokens.append(count)
            position += count
            yield message


def _runs(is_filled: Iterable[bool]) -> list[tuple[int, int]]:
    """(start, end) of each run that is not filled."""
    runs: list[tuple[int, int]] = []
    for filled, group in groupby(enumerate(is_filled), key=itemgetter(1)):
        indexes = [index for index, _ in group]
        if not filled:
            runs.append((indexes[0], indexes[-1] + 1))
    return runs


def tables_of(change: pb.BatchChange) -> dict[int, list[int]]:
    """Blocks that each slot grows by, in order."""
    tables: dict[int, list[int]] = {}
    for slot, block in zip(change.grown_slots, change.grown_blocks, strict=True):
        tables.setdefault(slot, []).append(block)
    return tables


def sequences_of(snapshot: pb.StepRequest) -> list[Restored]:
    """What a snapshot says, those with the fewest positions first, so that blocks are filled before they are shared."""
    prefill = snapshot.prefill
    tables = tables_of(prefill.change)
    computed = dict(zip(prefill.chunk_slots, prefill.chunk_tokens, strict=True))
    decoding = set(prefill.decode_slots)
    found = [
        Restored(each, tables.get(each.slot, []), computed[each.slot], each.slot in decoding)
        for each in prefill.change.admitted
    ]
    return sorted(found, key=lambda restored: restored.computed)
