"""Limits of a batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Sizes that are fixed once the KV cache is allocated."""

    max_batch_size: int
    max_tokens: int
    """Longest sequence, in tokens."""
    num_blocks: int
    block_size: int
    vocab_size: int
    padding_block: int = 0
    """The block for the tokens of padding rows in CUDA graphs; no sequence owns it."""
    max_draft_tokens: int = 0
    """Draft tokens of one sequence in one step."""
    row_tile: int = 1
    """Positions of a step cost the same up to the next multiple of this number, which is equal on all ranks."""

    @property
    def table_width(self) -> int:
        """Blocks that a sequence may own.

        The router may send two steps past the end of the longest sequence and reserves their positions in full,
        although the shard computes no position past the greatest length.
        """
        return -(-(self.max_tokens + 1 + 2 * self.max_draft_tokens) // self.block_size)
