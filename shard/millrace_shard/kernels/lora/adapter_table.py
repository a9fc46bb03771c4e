"""The adapters of a model by slot, and the rows of the forward pass that is running."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.device.transfers import upload
from millrace_shard.kernels.lora.adapter_rows import AdapterRows
from millrace_shard.kernels.lora.lora_site import LoraPart, LoraSite
from millrace_shard.kernels.lora.packed_adapter import PackedAdapter, PackedPart

ENTRY = 5
"""Numbers of an entry of `lora_table`."""
LEAST_GRID_SLICES = 4
"""Slices of the launches in graphs, which are captured without adapters: ranks up to 64."""


class AdapterTable:
    """The adapters in slots 1 … `max_adapters` of one model; slot 0 stands for no adapter.

    Only the engine thread changes it, between two steps, and only the engine thread runs forward passes.
    """

    def __init__(self, device: torch.device) -> None:
        """Without slots at first. The model adds its sites while it is loaded."""
        self.device = device
        self.parts: list[LoraPart] = []
        """All modules, in order of execution."""
        self.sites: list[LoraSite] = []
        self.token_rows: AdapterRows | None = None
        """The adapters of the tokens of the running pass."""
        self.logit_rows: AdapterRows | None = None
        """The adapters of the rows of the running head."""
        self._adapters: dict[int, PackedAdapter] = {}
        self.max_adapters = 0
        self.num_changes = 0
        """Adapters that were put into a slot or removed."""
        self.versions: Ints = np.zeros(1, dtype=np.int64)
        """[max_adapters + 1], a number that grows when a slot gets or loses an adapter."""
        self.lora_table = self._empty_table()
        """[max_adapters + 1, number of parts, 5] int64 on the device, for the sites that are not plain.

        An entry holds the addresses of A, B, factors and bias, 0 for no bias, then the number of slices. An entry of
        zeros is a module that the adapter does not change.
        """
        self.nothing = (
            torch.empty(0, dtype=torch.int32, device=device),
            torch.empty(0, 0, ENTRY, dtype=torch.int64, device=device),
        )
        """The operands of a step without adapters."""

    def add_site(self, parts: Sequence[LoraPart], *, is_head: bool = False) -> LoraSite:
        """A new site behind the others, in order of execution."""
        site = LoraSite(table=self, parts=tuple(parts), first=len(self.parts), is_head=is_head)
        self.parts += parts
        self.sites.append(site)
        return site

    def resize(self, max_adapters: int) -> None:
        """Drop all adapters, and have `max_adapters` slots."""
        self._adapters.clear()
        self.max_adapters = max_adapters
        self.versions = np.zeros(max_adapters + 1, dtype=np.int64)
        self.lora_table = self._empty_table()

    @property
    def grid_slices(self) -> int:
        """Slices that launches have programs for: as many as a module of any adapter has, or more."""
        return max(LEAST_GRID_SLICES, *(each.most_slices for each in self._adapters.values()), 0)

    @property
    def reads_on_device(self) -> bool:
        """Whether every linear reads on the device which adapters its rows have."""
        return all(site.packing == "slices" for site in self.sites)

    def get(self, slot: int) -> PackedAdapter | None:
        """The adapter in `slot`."""
        return self._adapters.get(slot)

    def adapters(self) -> dict[int, PackedAdapter]:
        """All adapters, by slot."""
        return dict(self._adapters)

    def part(self, slot: int, index: int) -> PackedPart | None:
        """The weights of the adapter in `slot` for part `index`; None if it does not change this module."""
        return self._adapters[slot].parts.get(index)

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        """Put `adapter` into `slot`, in place of another one."""
        assert 1 <= slot <= self.max_adapters, "the slot is checked before"
        self.move(slot, adapter)
        self._changed(slot)

    def move(self, slot: int, adapter: PackedAdapter) -> None:
        """Replace the adapter in `slot` by itself at other addresses."""
        self._adapters[slot] = adapter
        row = np.zeros((len(self.parts), ENTRY), dtype=np.int64)
        for site in self.sites:
            for index in range(site.first, site.first + len(site.parts)):
                part = adapter.parts.get(index)
                if part is not None and site.packing != "plain":
                    row[index] = _entry(part)
        self.lora_table[slot] = upload(row, self.device)

    def remove(self, slot: int) -> None:
        """Empty `slot`."""
        if self._adapters.pop(slot, None) is not None:
            self.lora_table[slot] = 0
            self._changed(slot)

    def _changed(self, slot: int) -> None:
        self.num_changes += 1
        self.versions[slot] = self.num_changes

    def _empty_table(self) -> Tensor:
        shape = (self.max_adapters + 1, len(self.parts), ENTRY)
        return torch.zeros(shape, dtype=torch.int64, device=self.device)


@contextmanager
def running(
    table: AdapterTable | None,
    *,
    tokens: AdapterRows | None = None,
    logits: AdapterRows | None = None,
) -> Iterator[None]:
    """Let the sites of `table` apply the adapters of these rows inside."""
    if table is None:
        yield
        return
    table.token_rows, table.logit_rows = tokens, logits
    try:
        yield
    finally:
        table.token_rows = table.logit_rows = None


def _entry(part: PackedPart) -> list[int]:
    bias = 0 if part.bias is None else part.bias.data_ptr()
    return [part.a.data_ptr(), part.b.data_ptr(), part.factors.data_ptr(), bias, part.num_slices]
