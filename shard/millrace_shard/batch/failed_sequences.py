"""Sequences that have failed, by slot: no token that they yield counts."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.batch.step_layout import StepLayout
from millrace_shard.device import transfers
from millrace_shard.device.transfers import upload


class FailedSequences:
    """A flag for each slot on the device. The host reads flags only where this needs no wait."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._flags = torch.zeros(size + 1, dtype=torch.bool, device=device)
        """[slots + 1]; the last one is for padding."""
        self._may_have_some = False

    def clear(self) -> None:
        """Every sequence has left. The flag of a slot is reset when the next sequence joins in this slot."""
        self._may_have_some = False

    def admit(self, slot: int) -> None:
        """Reset the flag of `slot` for a new sequence."""
        self._flags[slot] = False

    def add(self, slots: Ints, failed: Tensor) -> None:
        """Set the flags of those of `slots` [n] that have `failed` [n] bool."""
        self._add(upload(slots, self._device), failed)

    def with_earlier(
        self, layout: StepLayout, failed: Tensor, slots: Tensor | None = None
    ) -> Tensor:
        """Set the flags of samples that have `failed` [R] bool; the result has earlier failures too.

        `slots` [R] are those of the samples, if they are on the device already.
        """
        if transfers.is_synchronous(self._device) and not (
            self._may_have_some or failed.numpy().any()
        ):
            return failed
        if slots is None:
            slots = upload(layout.sampled, self._device)
        if len(layout.sampled) > len(layout.yields):
            self._add(slots, failed)
            return self._flags[slots]
        return self.merge(slots, failed)

    def merge(self, slots: Tensor, failed: Tensor) -> Tensor:
        """As `with_earlier`, for one sample of each of `slots` [R] on the device."""
        self._may_have_some = True
        failed = self._flags[slots].logical_or_(failed)
        self._flags[slots] = failed
        return failed

    def _add(self, slots: Tensor, failed: Tensor) -> None:
        """A slot that is named several times has failed if any of its samples has failed."""
        self._may_have_some = True
        counts = torch.zeros(len(self._flags), dtype=torch.int32, device=self._device)
        self._flags |= counts.index_add_(0, slots, failed.to(torch.int32)) > 0
