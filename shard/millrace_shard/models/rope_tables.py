"""The tables of a decoder's rotary embeddings on the model's device, one for each kind of layer."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_shard.models.rope import model_rope_table
from millrace_shard.models.spec.attention_spec import AttentionSpec
from millrace_shard.models.spec.rope_spec import RopeSpec


class RopeTables:
    """Makes each table once."""

    def __init__(self, max_total_tokens: int | None, device: torch.device) -> None:
        """`max_total_tokens` is the length of the longest sequence, if known."""
        self._max_total_tokens = max_total_tokens
        self._device = device
        self._tables: dict[RopeSpec, Tensor] = {}

    def query_factors(self, attention: AttentionSpec) -> Tensor | None:
        """[positions] float32: the factors of queries; None if they are not scaled by their position."""
        scaling, rope = attention.query_scaling, attention.rope
        if scaling is None or rope is None:
            return None
        positions = torch.arange(len(self.table(rope)), dtype=torch.float)
        steps = torch.floor(positions / scaling.positions)
        return (1 + scaling.beta * torch.log(1 + steps)).to(self._device)

    def table(self, rope: RopeSpec) -> Tensor:
        """The table of `rope_table` for `rope`."""
        if rope not in self._tables:
            self._tables[rope] = model_rope_table(rope, self._max_total_tokens).to(self._device)
        return self._tables[rope]
