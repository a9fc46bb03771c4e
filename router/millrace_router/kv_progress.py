"""KV positions that steps have filled: counted by row, and shared through the prefix cache once a block is full."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from millrace_router.blocks import BlockTable
from millrace_router.row import E, Row


def advance(
    filled: Iterable[tuple[int, int]],
    rows: tuple[Mapping[int, Row[E]], Mapping[int, Row[E]]],
    blocks: BlockTable,
    failed_slots: Container[int],
) -> None:
    """Count positions, by (slot, how many more), of whichever of `rows` has the slot.

    Of rows in `failed_slots` nothing is shared any more.
    """
    running, preempted = rows
    size, is_caching = blocks.block_size, blocks.cache is not None
    for slot, num_tokens in filled:
        # Runs for every token there is, hence few calls.
        row = running.get(slot) or preempted.get(slot)
        if row is None:
            continue
        row.num_computed += num_tokens
        if not is_caching:
            continue
        if slot in failed_slots:
            blocks.forget(slot)
        elif row.num_computed >= row.num_entered + size:
            num_full = row.num_computed // size
            if row.is_flexible:
                # The tokens of guesses that were right are not delivered yet.
                num_full = min(row.num_computed, row.entry.num_inputs) // size
            blocks.enter(slot, row.entry.block_keys(num_full))
            row.num_entered = num_full * size
