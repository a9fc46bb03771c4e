"""The adapters that this shard holds, and the pages that they fill."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import torch

from millrace_shard.adapters.canonical_file import read_canonical
from millrace_shard.adapters.packing import AdapterPacker
from millrace_shard.adapters.pages import bytes_per_slice
from millrace_shard.errors import AdapterInvalid, AdapterMemoryFull
from millrace_shard.kernels.lora.adapter_table import AdapterTable
from millrace_shard.kernels.lora.lora_site import LoraPart
from millrace_shard.kernels.lora.packed_adapter import PackedAdapter


class AdapterStore:
    """Reads adapters on any thread; the engine thread puts them into their slots and removes them."""

    def __init__(self, table: AdapterTable, cache: Path, dtype: torch.dtype) -> None:
        """`cache` has a folder for each digest; a model that computes in `dtype` has added its sites to `table`."""
        self.table = table
        self.num_pages = 0
        self._cache = cache
        self._dtype = dtype
        self._packer = AdapterPacker(table, dtype)
        self._lock = Lock()
        self._pages: dict[int, int] = {}
        """Pages of each slot, of adapters that are being read too."""

    def modules(self) -> list[tuple[LoraPart, int]]:
        """The modules that adapters may change, in order of execution, with their bytes per slice on this rank."""
        return [(part, bytes_per_slice(part, self._dtype)) for part in self.table.parts]

    def resize(self, max_adapters: int, num_pages: int) -> None:
        """Drop all adapters and have room for `max_adapters` in `num_pages`; on the engine thread."""
        with self._lock:
            self._pages.clear()
            self.num_pages = num_pages
        self.table.resize(max_adapters)

    def holds(self, slot: int, digest: str) -> bool:
        """Whether `slot` holds this adapter."""
        adapter = self.table.get(slot)
        return adapter is not None and adapter.digest == digest

    def read(self, slot: int, digest: str) -> PackedAdapter:
        """Read an adapter for `slot`, which keeps the pages for it until `put` or `discard`.

        Raises AdapterInvalid, or AdapterMemoryFull if it does not fit beside the adapters in other slots.
        """
        if not 1 <= slot <= self.table.max_adapters:
            raise AdapterInvalid(f"adapter slot {slot} is not one of {self.table.max_adapters}")
        modules = read_canonical(self._cache, digest)
        pages = self._packer.num_pages(modules)
        with self._reserved(slot, pages):
            parts = self._packer.pack(modules)
        return PackedAdapter(digest=digest, parts=parts, num_pages=pages)

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        """Put an adapter of `read` into its slot; on the engine thread."""
        self.table.put(slot, adapter)

    def discard(self, slot: int) -> None:
        """Give up an adapter of `read` that is not put into its slot."""
        held = self.table.get(slot)
        self._set_pages(slot, 0 if held is None else held.num_pages)

    def remove(self, slot: int) -> None:
        """Empty `slot`; on the engine thread."""
        self.table.remove(slot)
        self._set_pages(slot, 0)

    @contextmanager
    def _reserved(self, slot: int, pages: int) -> Iterator[None]:
        """Count `pages` for `slot`, and no longer if the block raises."""
        with self._lock:
            used = sum(count for other, count in self._pages.items() if other != slot)
            if used + pages > self.num_pages:
                raise AdapterMemoryFull(
                    f"the adapter fills {pages} pages, but {self.num_pages - used} of {self.num_pages} are free"
                )
            self._pages[slot] = pages
        try:
            yield
        except BaseException:
            self.discard(slot)
            raise

    def _set_pages(self, slot: int, pages: int) -> None:
        with self._lock:
            self._pages[slot] = pages
