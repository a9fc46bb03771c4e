"""The tables of a decoder's rotary embeddings on the model's device, one for each kind of layer."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_shard.models.rope import model_rope_table
from millrace_shard.models.spec.rope_spec import RopeSpec


class RopeTables:
    """Makes each table once."""

    def __init__(self, max_total_tokens: int | None, device: torch.device) -> None:
        """`max_total_tokens` is the length of the longest sequence, if known."""
        self._max_total_tokens = max_total_tokens
        self._device = device
        self._tables: dict[RopeSpec, Tensor] = {}

    def table(self, rope: RopeSpec) -> Tensor:
        """The table of `rope_table` for `rope`."""
        if rope not in self._tables:
            self._tables[rope] = model_rope_table(rope, self._max_total_tokens).to(self._device)
        return self._tables[rope]
