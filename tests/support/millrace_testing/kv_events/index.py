"""What a router of several servers knows of one server's prefix cache: the index that vLLM's events describe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


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
