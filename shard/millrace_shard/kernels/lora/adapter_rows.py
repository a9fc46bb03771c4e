"""The adapters of the rows of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.device.transfers import upload


@dataclass(frozen=True, slots=True)
class AdapterGroup:
    """The rows of one adapter."""

    slot: int
    """Its adapter slot, at least 1."""
    rows: Tensor
    """[n] int64 on the device, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdapterRows:
    """The adapter slot of each of T rows, at least one of which has an adapter. It outlives the step."""

    host: Ints
    """[T], the adapter slot of each row; 0 for rows of the base model."""
    slots: Tensor
    """[T] int32 on the device: `host`, as operators take it in `lora_rows`."""
    groups: tuple[AdapterGroup, ...]
    """The rows of each adapter, by ascending slot."""
    logits: AdapterRows | None
    """The same for the rows whose logits are needed; None if none of them has an adapter."""

    @staticmethod
    def of(
        host: Ints, device: torch.device, *, logit_rows: Ints | None = None
    ) -> AdapterRows | None:
        """Rows with the adapter slots `host` [T], of which `logit_rows` need logits, or all; None without adapters."""
        if not host.any():
            return None
        groups = tuple(
            AdapterGroup(int(slot), upload(np.flatnonzero(host == slot), device))
            for slot in np.unique(host[host > 0])
        )
        slots = upload(host.astype(np.int32), device)
        if logit_rows is not None:
            logits = AdapterRows.of(host[logit_rows], device)
            return AdapterRows(host=host, slots=slots, groups=groups, logits=logits)
        alone = AdapterRows(host=host, slots=slots, groups=groups, logits=None)
        return AdapterRows(host=host, slots=slots, groups=groups, logits=alone)

    def select(self, rows: Ints) -> AdapterRows | None:
        """The adapters of `rows` [n] of these rows; None if none of them has one."""
        return AdapterRows.of(self.host[rows], self.slots.device)
