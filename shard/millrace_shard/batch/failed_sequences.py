"""Sequences whose logits were not finite once, by slot: nothing they yield later counts."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.batch.step_layout import StepLayout
from millrace_shard.device import transfers
from millrace_shard.device.transfers import upload


class FailedSequences:
    """A flag for each slot on the device, which the host reads only where that waits for nobody."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._flags = torch.zeros(size, dtype=torch.bool, device=device)
        self._are_some = False
        """Whether any may be set, where the host can tell."""

    def clear(self) -> None:
        """Every sequence has gone. Flags of slots are taken back when the next one is admitted to them."""
        self._are_some = False

    def admit(self, slot: int) -> None:
        """A sequence begins in `slot`, and has not failed."""
        self._flags[slot] = False

    def add(self, slots: Ints, failed: Tensor) -> None:
        """Keep in mind which of `slots` [n] have `failed` [n] bool."""
        self._add(upload(slots, self._device), failed)

    def with_earlier(self, prepared: StepLayout, failed: Tensor) -> Tensor:
        """Keep in mind which samples have `failed` [R] bool; returns that with those whose sequence failed before."""
        if transfers.is_synchronous(self._device) and not (self._are_some or failed.numpy().any()):
            return failed
        slots = upload(prepared.sampled, self._device)
        if len(prepared.sampled) > len(prepared.yields):
            self._add(slots, failed)
            return self._flags[slots]
        self._are_some = True
        failed = self._flags[slots].logical_or_(failed)
        self._flags[slots] = failed
        return failed

    def _add(self, slots: Tensor, failed: Tensor) -> None:
        """A slot that is named several times has failed where any of them says so."""
        self._are_some = True
        counts = torch.zeros(len(self._flags), dtype=torch.int32, device=self._device)
        self._flags |= counts.index_add_(0, slots, failed.to(torch.int32)) > 0
