"""Rotary embeddings of transformers' classes as tables over positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace_shard.models.rope import POSITIONS_PER_STEP, model_rope_table
from millrace_shard.models.transformers_backend.transformers_rope import (
    rope_depends_on_length,
    rope_of,
)


class TableRotary(nn.Module):
    """A class's rotary embedding as a table: the rotation of a position does not depend on the rest of the step.

    Computed per step, the last bits of cosines would depend on the number of tokens, and for some kinds of RoPE the
    angles would depend on the longest sequence.
    """

    def __init__(self, cosines: Tensor, sines: Tensor) -> None:
        """Both are [positions, rotary_dim], in the layout of the class."""
        super().__init__()
        self._cosines = cosines
        self._sines = sines

    def forward(self, _: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `position_ids` [1, T]: [1, T, rotary_dim]."""
        return self._cosines[position_ids], self._sines[position_ids]


def use_rotary_table(model: PreTrainedModel, longest: int, max_total_tokens: int | None) -> None:
    """Replace the rotary embedding by a table for sequences of up to min(`longest`, `max_total_tokens`) tokens."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None:
        return
    rope = rope_of(model.config) if rope_depends_on_length(model.config) else None
    if rope is not None:
        table = model_rope_table(rope, max_total_tokens).to(model.device, model.dtype)
        cosines, sines = (torch.cat((half, half), dim=-1) for half in table.chunk(2, dim=-1))
    else:
        x = torch.empty(0, dtype=model.dtype, device=model.device)
        positions = torch.arange(min(longest, max_total_tokens or longest), device=model.device)
        parts = [
            rotary(x, part.unsqueeze(0)) for part in torch.split(positions, POSITIONS_PER_STEP)
        ]
        cosines, sines = (torch.cat([part[i][0] for part in parts]) for i in (0, 1))
    model.base_model.rotary_emb = TableRotary(cosines, sines)
