"""How much a batch may hold."""

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
    """Where rows that pad a captured step store their one token: a block that no sequence owns."""
    max_draft_tokens: int = 0
    """Tokens that may be guessed ahead for one sequence in one step."""
    row_tile: int = 1
    """Positions up to a multiple of which a step costs the same; the same on all ranks, as they compute the same."""

    @property
    def table_width(self) -> int:
        """Blocks a sequence may own.

        Those of the longest one and of two steps sent ahead of its end, whose room the router counts in full though
        nothing past the longest is ever computed.
        """
        return -(-(self.max_tokens + 1 + 2 * self.max_draft_tokens) // self.block_size)
