"""A random life of a prefix cache: sequences come, compute, fail and go, and epochs end."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from millrace_router.kv_events.recorder import EventRecorder
from millrace_router.request.block_hashes import BlockHashes
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.prefix_cache import PrefixCache

BLOCK_SIZE = 4
NUM_BLOCKS = 40
ADAPTERS = (None, None, "first", "second")


@dataclass
class CachedSequence:
    """A running sequence and the keys of its blocks."""

    hashes: BlockHashes
    tokens: list[int]
    adapter: str | None
    salted: bool
    num_entered: int = 0


class CacheLife:
    """Does one random operation after another, and knows what a subscriber should know."""

    def __init__(
        self,
        recorder: EventRecorder,
        seed: int,
        adapters: tuple[str | None, ...] = ADAPTERS,
    ) -> None:
        self._adapters = adapters
        self._random = random.Random(seed)
        self._recorder = recorder
        self._slots = count()
        self._chains: dict[bytes, list[bytes]] = {}
        self._known: dict[bytes, tuple[str | None, tuple[int, ...]]] = {}
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Begin with an empty cache and without sequences."""
        self.cache: PrefixCache = self._recorder.new_cache()
        self._blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE, self.cache)
        self._running: dict[int, CachedSequence] = {}

    def step(self) -> None:
        """Do one operation."""
        if self._random.random() < 0.0005:
            self.begin_epoch()
        elif not self._running or self._random.random() < 0.35:
            self._admit()
        else:
            slot = self._random.choice(list(self._running))
            kind = self._random.random()
            if kind < 0.55:
                self._compute(slot)
            elif kind < 0.6:
                self._blocks.forget(slot)
                self._release(slot)
            else:
                self._release(slot)

    def contents(self) -> set[tuple[str | None, tuple[int, ...]]]:
        """Return what the index of a subscriber should hold: findable blocks that are published."""
        found = set()
        for key in self._known:
            chain = self._chains[key]
            if len(self.cache.find(chain)) == len(chain):
                found.add(self._known[key])
        return found

    def _admit(self) -> None:
        # Few different tokens, so that many sequences begin alike.
        length = self._random.randrange(1, 7) * BLOCK_SIZE
        tokens = [self._random.choice((1, 1, 1, 2)) for _ in range(length)]
        adapter, salted = self._random.choice(self._adapters), self._random.random() < 0.1
        hashes = BlockHashes(
            BLOCK_SIZE,
            adapter,
            ("salt",) if salted else (),
            keeps_content=True,
            adapter_name=adapter,
        )
        keys = hashes.first(length // BLOCK_SIZE, tokens, [])
        if not salted:
            for place, key in enumerate(keys):
                end = (place + 1) * BLOCK_SIZE
                self._known[bytes(key)] = adapter, tuple(tokens[:end])
                self._chains[bytes(key)] = list(keys[: place + 1])
        hits = self._blocks.find(keys)
        if self._blocks.shortage(length, hits) > 0:
            return
        slot = next(self._slots)
        self._blocks.admit(slot, length, hits=hits, keys=keys)
        self._blocks.grow(slot, length)
        self._running[slot] = CachedSequence(hashes, tokens, adapter, salted, len(hits))

    def _compute(self, slot: int) -> None:
        row = self._running[slot]
        most = len(row.tokens) // BLOCK_SIZE
        row.num_entered = min(most, row.num_entered + self._random.randrange(1, 4))
        self._blocks.enter(slot, row.hashes.first(row.num_entered, row.tokens, []))

    def _release(self, slot: int) -> None:
        self._blocks.release(slot)
        del self._running[slot]


@dataclass
class BlockIndex:
    """Blocks by their hash, each with its parent's hash, its tokens and its adapter."""

    block_size: int
    blocks: dict[int, tuple[int | None, tuple[int, ...], str | None]] = field(default_factory=dict)

    def apply(self, events: Iterable[Sequence[Any]]) -> None:
        """Follow the events of a batch, each an array that begins with its name."""
        for name, *fields in events:
            if name == "BlockStored":
                self._store(*fields)
            elif name == "BlockRemoved":
                hashes, medium = fields
                assert medium == "GPU"
                for one in hashes:
                    del self.blocks[one]
            else:
                assert (name, fields) == ("AllBlocksCleared", [])
                self.blocks.clear()

    def _store(
        self,
        hashes: list[int],
        parent: int | None,
        token_ids: list[int],
        block_size: int,
        lora_id: int | None,
        medium: str | None,
        lora_name: str | None,
    ) -> None:
        assert (block_size, lora_id, medium) == (self.block_size, None, "GPU")
        assert len(token_ids) == len(hashes) * block_size
        for place, one in enumerate(hashes):
            assert 0 <= one < 1 << 64
            assert one not in self.blocks
            ids = tuple(token_ids[place * block_size : (place + 1) * block_size])
            self.blocks[one] = (parent, ids, lora_name)
            parent = one

    def contents(self) -> set[tuple[str | None, tuple[int, ...]]]:
        """Return, for each block whose beginning is known, its adapter and all tokens up to its end."""
        return {
            (name, tokens)
            for one, (_, _, name) in self.blocks.items()
            if (tokens := self._tokens(one)) is not None
        }

    def _tokens(self, one: int) -> tuple[int, ...] | None:
        parts = []
        current: int | None = one
        while current is not None:
            if current not in self.blocks:
                return None
            current, ids, _ = self.blocks[current]
            parts.append(ids)
        return tuple(token for ids in reversed(parts) for token in ids)
