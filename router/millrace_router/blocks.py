"""Which sequence owns which KV blocks. Pure bookkeeping: the shards only obey it."""

from __future__ import annotations


class BlockTable:
    """Fixed-size KV blocks, handed out one by one within what each sequence has reserved.

    Invariant: free + owned = num_blocks - 1 (block 0 is the shards' scrap block and never handed out),
    and the free blocks always cover every reservation, so `grow` cannot run out.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"no block to hand out: {num_blocks=} {block_size=}")
        self.block_size = block_size
        self.num_blocks = num_blocks - 1
        self._free = list(range(num_blocks - 1, 0, -1))
        self._owned: dict[int, list[int]] = {}
        self._reserved: dict[int, int] = {}
        self._num_promised = 0

    @property
    def num_in_use(self) -> int:
        """Blocks that hold some sequence's KV."""
        return self.num_blocks - len(self._free)

    @property
    def num_reserved(self) -> int:
        """Blocks in use or promised to a sequence that has been admitted."""
        return self.num_in_use + self._num_promised

    def fits(self, num_tokens: int) -> bool:
        """Whether `num_tokens` positions can be reserved now."""
        return self._count(num_tokens) <= self.num_blocks - self.num_reserved

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Promise `slot` the blocks of `num_tokens` positions.

        Raises:
            ValueError: the slot holds a reservation already, or the blocks are not there.

        """
        if slot in self._owned or not self.fits(num_tokens):
            raise ValueError(f"cannot reserve {num_tokens} tokens for slot {slot}")
        self._owned[slot] = []
        self._reserved[slot] = self._count(num_tokens)
        self._num_promised += self._reserved[slot]

    def grow(self, slot: int, num_tokens: int) -> list[int]:
        """Hand out what `slot` still lacks to hold `num_tokens` positions, in table order.

        Raises:
            ValueError: more than was reserved.

        """
        owned = self._owned[slot]
        missing = self._count(num_tokens) - len(owned)
        if missing <= 0:
            return []
        if len(owned) + missing > self._reserved[slot]:
            raise ValueError(f"slot {slot} grows to {num_tokens} tokens, beyond its reservation")
        blocks = [self._free.pop() for _ in range(missing)]
        self._num_promised -= missing
        owned.extend(blocks)
        return blocks

    def release(self, slot: int) -> None:
        """Take back everything `slot` owns or was promised."""
        owned = self._owned.pop(slot)
        self._num_promised -= self._reserved.pop(slot) - len(owned)
        self._free.extend(reversed(owned))

    def _count(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
