"""Random steps: sequences join, compute their prompts in chunks, decode and leave, as a seed decides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.step import BatchChange, Forward

MOST_NEW_TOKENS = 12
MOST_CHUNK = 24


@dataclass(slots=True)
class _Row:
    """A running sequence."""

    left: int
    """Prompt tokens to compute."""
    to_decode: int
    blocks: list[int]


class RandomSteps:
    """Steps that are valid for an empty batch of `max_rows` slots; the same seed gives the same steps."""

    def __init__(
        self,
        seed: int,
        *,
        max_rows: int,
        vocab_size: int,
        block_size: int,
        longest_prompt: int,
    ) -> None:
        self._random = np.random.default_rng(seed)
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._longest_prompt = longest_prompt
        self._rows: dict[int, _Row] = {}
        self._free = list(range(1, self.num_blocks))

    @property
    def num_blocks(self) -> int:
        """Blocks that the steps use, with block 0."""
        longest = self._longest_prompt + MOST_NEW_TOKENS + 1
        return 1 + self._max_rows * -(-longest // self._block_size)

    def __iter__(self) -> Iterator[Forward]:
        """Steps without end."""
        while True:
            yield self._next()

    def _next(self) -> Forward:
        dropped = [slot for slot, row in self._rows.items() if not row.left and not row.to_decode]
        for slot in dropped:
            self._free += self._rows.pop(slot).blocks
        admitted = None
        if len(self._rows) < self._max_rows and (not self._rows or self._random.random() < 0.4):
            admitted = self._admit()
        chunks, decodes = self._work()
        slots = [] if admitted is None else [admitted.slot] * len(self._rows[admitted.slot].blocks)
        return Forward(
            change=BatchChange(
                dropped_slots=_ints(dropped),
                admitted=() if admitted is None else (admitted,),
                grown_slots=_ints(slots),
                grown_blocks=_ints([] if admitted is None else self._rows[admitted.slot].blocks),
            ),
            chunk_slots=_ints(list(chunks)),
            chunk_tokens=_ints(list(chunks.values())),
            decode_slots=_ints(decodes),
        )

    def _admit(self) -> Sequence:
        slot = min(set(range(self._max_rows)) - self._rows.keys())
        length = int(self._random.integers(1, self._longest_prompt + 1))
        new_tokens = int(self._random.integers(1, MOST_NEW_TOKENS + 1))
        count = -(-(length + new_tokens + 1) // self._block_size)
        blocks = [self._free.pop(0) for _ in range(count)]
        self._rows[slot] = _Row(length, new_tokens, blocks)
        ids = self._random.integers(1, self._vocab_size, length)
        return Sequence(slot=slot, request_id=slot, input_ids=ids)

    def _work(self) -> tuple[dict[int, int], list[int]]:
        """Chunks by slot, and slots that decode; each ready sequence decodes in most steps."""
        chunks: dict[int, int] = {}
        decodes = []
        for slot, row in self._rows.items():
            if row.left:
                chunks[slot] = int(self._random.integers(1, min(row.left, MOST_CHUNK) + 1))
                row.left -= chunks[slot]
            elif self._random.random() < 0.8:
                decodes.append(slot)
                row.to_decode -= 1
        return chunks, decodes


def _ints(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)
