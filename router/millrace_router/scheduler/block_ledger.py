"""The router's copy of the shards' directories of KV blocks, where KV outlives the shards that computed it."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class StoredBlock(NamedTuple):
    """An entry of a rank's directory."""

    owner: int
    """The request that the block was handed out to."""
    generation: int
    """The step that handed it out."""
    key: bytes
    """The key of the block's content; empty unless the block is sealed."""


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A rank's directory."""

    life: int
    """The ledger that it follows; 0: none."""
    blocks: Mapping[int, StoredBlock]


@dataclass(slots=True, kw_only=True)
class Seals:
    """Changes of what blocks are known to hold, in the order in which they apply."""

    unsealed: list[int] = field(default_factory=list)
    sealed: dict[int, bytes] = field(default_factory=dict)
    """Keys by block."""

    def __bool__(self) -> bool:
        return bool(self.unsealed or self.sealed)


MARK_BITS = 32
"""Bits of a life that say what the keys of its blocks mean."""


def new_life(mark: int) -> int:
    """Draw the number of a new ledger, not 0; `mark`, of 32 bits, differs where equal keys name other KV."""
    return (1 + secrets.randbits(30) << MARK_BITS) + mark


def sealed_alike(ranks: Sequence[StoredBlocks], mark: int) -> dict[int, bytes] | None:
    """Return the blocks that are sealed on all `ranks` [at least 1], with their keys; None on any doubt.

    The directories are of a router that is gone: they follow one ledger with `mark`, and no entries contradict each
    other. The order is for eviction: owners that got a block recently come last, and each owner's blocks begin with the
    end of its sequence.
    """
    first, *others = ranks
    if first.life & ((1 << MARK_BITS) - 1) != mark or not first.life >> MARK_BITS:
        return None
    if any(other.life != first.life for other in others):
        return None
    sealed = {block: entry for block, entry in first.blocks.items() if entry.key}
    for other in others:
        alike = {block: other.blocks.get(block) for block in sealed}
        alike = {block: entry for block, entry in alike.items() if entry is not None and entry.key}
        if any(entry != sealed[block] for block, entry in alike.items()):
            return None
        sealed = {block: sealed[block] for block in alike}
    latest: dict[int, int] = {}
    for entry in sealed.values():
        latest[entry.owner] = max(latest.get(entry.owner, 0), entry.generation)
    order = sorted(
        sealed, key=lambda block: (latest[sealed[block].owner], -sealed[block].generation)
    )
    return {block: sealed[block].key for block in order}


class BlockLedger:
    """Records which step handed out each block, and to which request, as the shards do in their directories.

    A full block is sealed with its key once its step is answered. The shards learn that with a later step, so that a
    directory may lack seals, but has no wrong ones.
    """

    def __init__(self, life: int) -> None:
        """`life` is of `new_life`; no other ledger has it that the shards may have followed."""
        self.life = life
        self.generation = 0
        """The step that is planned: the sum of its epoch and its number."""
        self._entries: dict[int, tuple[int, int]] = {}
        self._changes = Seals()

    def adopt(self, rank: StoredBlocks, blocks: Iterable[int]) -> None:
        """Continue the ledger that the directory of `rank` follows; of others than `blocks` the keys are forgotten."""
        self.life, used = rank.life, set(blocks)
        for block, entry in rank.blocks.items():
            if block in used:
                self._entries[block] = (entry.owner, entry.generation)
            elif entry.key:
                self.unseal(block)

    def hand_out(self, blocks: Iterable[int], owner: int) -> None:
        """Record that the planned step gives `blocks` to the request `owner`."""
        for block in blocks:
            self._entries[block] = (owner, self.generation)
            self._changes.sealed.pop(block, None)

    def seal(self, block: int, key: bytes) -> None:
        """Record that `block` holds what `key` names."""
        self._changes.sealed[block] = key

    def unseal(self, block: int) -> None:
        """Record that `block` is not to be used by its key any more."""
        if self._changes.sealed.pop(block, None) is None:
            self._changes.unsealed.append(block)

    def take_seals(self) -> Seals:
        """Return the changes that no step has sent yet."""
        changes, self._changes = self._changes, Seals()
        return changes

    def settle(self, ranks: Sequence[StoredBlocks], held: Mapping[int, bytes | None]) -> str | None:
        """Compare the directories of all `ranks` with the blocks that are `held`, with their keys if they are cached.

        Returns the kind of the first difference: `empty`, `life`, `entry` or `key`. Without one, the next step sends
        the seals that a rank lacks, or has in excess.
        """
        missing = Seals()
        for rank in ranks:
            if rank.life != self.life:
                return "life" if rank.life else "empty"
            for block, key in held.items():
                entry = rank.blocks.get(block)
                if entry is None or (entry.owner, entry.generation) != self._entries.get(block):
                    return "entry"
                if entry.key and key and entry.key != key:
                    return "key"
                if entry.key and not key:
                    missing.unsealed.append(block)
                elif key and not entry.key:
                    missing.sealed[block] = key
            excess = (block for block, entry in rank.blocks.items() if entry.key)
            missing.unsealed += [block for block in excess if block not in held]
        missing.unsealed = list(dict.fromkeys(missing.unsealed))
        self._changes = missing
        return None
