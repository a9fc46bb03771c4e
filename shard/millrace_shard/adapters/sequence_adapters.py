"""The adapters of the sequences of a batch."""

from __future__ import annotations

import numpy as np
import torch

from millrace_shard.arrays import Ints
from millrace_shard.errors import StepInvalid
from millrace_shard.kernels.lora.adapter_rows import AdapterRows
from millrace_shard.kernels.lora.adapter_table import AdapterTable


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

        The logits of `logit_rows` are needed, or those of all. Raises StepInvalid if the adapter of a sequence has left
        its slot.
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
