"""The adapters that this shard holds, the pages that they fill, and the sequences that use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from millrace_shard.adapters.arena import AdapterArena, bytes_per_slice, run_of, together
from millrace_shard.adapters.packing import AdapterPacker, read_canonical
from millrace_shard.arrays import Ints
from millrace_shard.errors import AdapterInvalid, AdapterMemoryFull, StepInvalid
from millrace_shard.kernels.lora.adapter_table import (
    AdapterRows,
    AdapterTable,
    LoraPart,
    PackedAdapter,
)

CPU = torch.device("cpu")
BetweenSteps = Callable[[Callable[[], None]], None]
"""Runs a function on the engine thread, between two steps, and waits for it."""


def _at_once(function: Callable[[], None]) -> None:
    function()


class AdapterStore:
    """Reads adapters on any thread; the engine thread puts them into their slots and removes them."""

    def __init__(
        self, table: AdapterTable, cache: Path, dtype: torch.dtype, *, reserves: bool | None = None
    ) -> None:
        """`cache` has a folder for each digest; a model that computes in `dtype` has added its sites to `table`.

        `reserves`: whether the memory of all pages is reserved by `resize`, which is the default on a GPU. Otherwise
        every adapter is allocated for itself.
        """
        self.table = table
        self.num_pages = 0
        self.reserves = table.device.type != "cpu" if reserves is None else reserves
        self._cache = cache
        self._dtype = dtype
        self._packer = AdapterPacker(table, dtype, CPU if self.reserves else None)
        self._arena: AdapterArena | None = None
        self._written: AdapterArena | None = None
        """The memory of the last adapter that was read; another warm-up reserves memory anew."""
        self._loading = Lock()
        self._lock = Lock()
        self._pages: dict[int, int] = {}
        """Pages of each slot, of adapters that are being read too."""

    def modules(self) -> list[tuple[LoraPart, int]]:
        """The modules that adapters may change, in order of execution, with their bytes per slice on this rank."""
        modules: dict[str, tuple[LoraPart, int]] = {}
        for part in self.table.parts:
            _, size = modules.get(part.name, (part, 0))
            modules[part.name] = part, size + bytes_per_slice(part, self._dtype)
        return list(modules.values())

    def resize(self, max_adapters: int, num_pages: int) -> None:
        """Drop all adapters and have room for `max_adapters` in `num_pages`; on the engine thread."""
        with self._lock:
            self._pages.clear()
            self.num_pages = num_pages
        self.table.resize(max_adapters)
        if self.reserves:
            self._arena = None
            self._arena = AdapterArena(num_pages, self.table.device)

    def holds(self, slot: int, digest: str) -> bool:
        adapter = self.table.get(slot)
        return adapter is not None and adapter.digest == digest

    @contextmanager
    def loading(self) -> Iterator[None]:
        """From `read` to `put` or `discard` inside; one at a time if memory is reserved, as adapters may move."""
        with self._loading if self.reserves else nullcontext():
            yield

    def read(self, slot: int, digest: str, between_steps: BetweenSteps = _at_once) -> PackedAdapter:
        """Read an adapter for `slot`, which keeps the pages for it until `put` or `discard`.

        `between_steps` runs a function on the engine thread. If the reserved memory cannot hold the new adapter as well
        as the one in `slot`, the latter is removed. Raises AdapterInvalid, or AdapterMemoryFull if the new adapter does
        not fit with the adapters in other slots.
        """
        if not 1 <= slot <= self.table.max_adapters:
            raise AdapterInvalid(f"adapter slot {slot} is not one of {self.table.max_adapters}")
        modules = read_canonical(self._cache, digest)
        pages = self._packer.num_pages(modules)
        with self._reserved(slot, pages):
            parts = self._packer.pack(modules)
            adapter = PackedAdapter(digest=digest, parts=parts, num_pages=pages)
            if self._arena is None:
                return together(adapter) if self.table.device.type == "cpu" else adapter
            return self._write(self._arena, slot, adapter, between_steps)

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        """Put an adapter of `read` into its slot; on the engine thread."""
        before = self.table.get(slot)
        self.table.put(slot, adapter)
        self._release(before)
        # A load that was given up meanwhile may have counted the slot as it was.
        self._count_held(slot)

    def discard(self, slot: int, adapter: PackedAdapter) -> None:
        """Give up an adapter of `read` that is not put into its slot."""
        if self._written is not None:
            self._written.runs.free(run_of(adapter))
        self._count_held(slot)

    def remove(self, slot: int) -> None:
        """Empty `slot`; on the engine thread."""
        before = self.table.get(slot)
        self.table.remove(slot)
        self._release(before)
        self._set_pages(slot, 0)

    def clear(self) -> None:
        """Empty all slots, and keep their number and the memory; on the engine thread."""
        for slot in self.table.adapters():
            self.remove(slot)

    def _write(
        self, arena: AdapterArena, slot: int, adapter: PackedAdapter, between_steps: BetweenSteps
    ) -> PackedAdapter:
        """Copy `adapter` into the reserved memory, in which its pages are counted."""
        run = arena.runs.allocate(adapter.num_pages)
        if run is None:
            between_steps(partial(self._make_room, arena, slot, adapter.num_pages))
            run = arena.runs.allocate(adapter.num_pages)
        assert run is not None, "the pages are counted, and loads wait for each other"
        self._written = arena
        try:
            return arena.write(run, adapter)
        except BaseException:
            arena.runs.free(run)
            raise

    def _make_room(self, arena: AdapterArena, slot: int, pages: int) -> None:
        """Make a run of `pages` for `slot`; on the engine thread."""
        before = self.table.get(slot)
        if before is not None and arena.runs.num_free < pages:
            self.table.remove(slot)
            self._release(before)
        adapters = self.table.adapters()
        moved = arena.compact(adapters.values())
        for other, adapter in zip(adapters, moved, strict=True):
            self.table.move(other, adapter)

    def _release(self, adapter: PackedAdapter | None) -> None:
        if self._arena is not None and adapter is not None:
            self._arena.release(adapter)

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
            self._count_held(slot)
            raise

    def _count_held(self, slot: int) -> None:
        held = self.table.get(slot)
        self._set_pages(slot, 0 if held is None else held.num_pages)

    def _set_pages(self, slot: int, pages: int) -> None:
        with self._lock:
            self._pages[slot] = pages


class SequenceAdapters:
    """The adapter slot of each sequence, by the slot of the sequence."""

    def __init__(self, size: int, table: AdapterTable | None, device: torch.device) -> None:
        """For sequences in slots 0 … `size` - 1; without a table no sequence may have an adapter."""
        self.table = table
        self._device = device
        self._slots = np.zeros(size, dtype=np.int64)
        self._versions = np.zeros(size, dtype=np.int64)
        """The version of the adapter slot when its sequence was admitted."""
        self._last: tuple[bytes, AdapterRows | None] = b"", None
        """The rows of the last step and their adapters."""

    def check(self, adapter_slot: int) -> None:
        """Raise StepInvalid if a new sequence cannot have the adapter in this slot."""
        if adapter_slot and (self.table is None or self.table.get(adapter_slot) is None):
            raise StepInvalid(f"there is no adapter in adapter slot {adapter_slot}")

    def admit(self, slot: int, adapter_slot: int) -> None:
        """The sequence in `slot` has the adapter in `adapter_slot`, or none if it is 0."""
        self._slots[slot] = adapter_slot
        if self.table is not None:
            self._versions[slot] = self.table.versions[adapter_slot]

    def are_used(self, slots: Ints) -> bool:
        """Whether a sequence in `slots` has an adapter."""
        return self.table is not None and bool(self._slots[slots].any())

    def rows(self, slots: Ints, counts: Ints | None, logit_rows: Ints | None) -> AdapterRows | None:
        """The adapters of a step with `counts` [B] tokens of `slots` [B], by default one each.

        The logits of `logit_rows`, by default of all tokens, are needed. Raises StepInvalid if the adapter of a
        sequence has left its slot.
        """
        table = self.table
        if table is None or not self.are_used(slots):
            return None
        adapter_slots = self._slots[slots]
        columns = [np.array([table.num_changes, len(slots)]), slots, adapter_slots]
        columns += [each for each in (counts, logit_rows) if each is not None]
        key = b"".join(column.tobytes() for column in columns)
        if key == self._last[0]:
            return self._last[1]
        if (self._versions[slots] != table.versions[adapter_slots])[adapter_slots > 0].any():
            raise StepInvalid("an adapter has left its slot before a sequence that uses it")
        by_token = adapter_slots if counts is None else np.repeat(adapter_slots, counts)
        rows = AdapterRows.of(by_token, self._device, logit_rows=logit_rows)
        self._last = key, rows
        return rows
