"""Rotary embeddings of transformers' configs and classes: as a RopeSpec, and as tables over positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from millrace_shard.models.config import ConfigReader, read_rope
from millrace_shard.models.rope import POSITIONS_PER_STEP, longest_position, model_rope_table
from millrace_shard.models.rope_spec import DynamicScaling, LongRopeScaling, RopeSpec


def rope_of(config: PretrainedConfig) -> RopeSpec | None:
    """The rotary embedding of all layers; None if there is none. Raises UnsupportedModel if they differ."""
    if not getattr(config, "rope_parameters", None):
        return None
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    reader = ConfigReader(config.to_dict(), {})
    return read_rope(reader, head_dim=int(head_dim), may_be_partial=True)


def rope_depends_on_length(config: PretrainedConfig) -> bool:
    """Whether the frequencies of the RoPE in `config` depend on the longest sequence."""
    rope = rope_of(config)
    return rope is not None and isinstance(rope.scaling, (DynamicScaling, LongRopeScaling))


def longest_sequence(config: PretrainedConfig) -> int:
    rope = rope_of(config)
    return int(config.max_position_embeddings) if rope is None else longest_position(rope)


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
