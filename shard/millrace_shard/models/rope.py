"""Tables of the cosines and sines of rotary position embeddings, for every kind that transformers supports."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from millrace_shard.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from millrace_shard.models.plain_config import PlainConfig

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds whose frequencies depend, in transformers, on the longest sequence in the batch."""
POSITIONS_PER_STEP = 8192


def rope_table(
    config: PlainConfig | PretrainedConfig, num_positions: int, *, long_context: bool = False
) -> Tensor:
    """A table [num_positions, rotary_dim] float32 on CPU: cosines in the first half, sines in the second, both scaled.

    Two kinds depend on a length. transformers takes the longest one in the batch, so that the keys of a sequence depend
    on the other sequences and on its prefill chunks. Here a row of the table depends on its position alone:

    - dynamic: position p is rotated as in a sequence of p + 1 tokens. That equals `generate` for prompts within
      `max_position_embeddings`, even if the generation exceeds it.
    - longrope: positions within `original_max_position_embeddings` use the short factors, later ones the long factors.
      That equals `generate` for prompts within that length. With `long_context`, all positions use the long factors.
      That equals `generate` for longer prompts, and suits a server of long prompts.

    Raises UnsupportedModel for any other kind, and for parameters that differ between layers.
    """
    rope_type = rope_kind(config)
    positions = torch.arange(num_positions)
    chunks = [
        _rotations(config, rope_type, chunk, long_context=long_context)
        for chunk in torch.split(positions, POSITIONS_PER_STEP)
    ]
    return torch.cat(chunks)


def model_rope_table(
    config: PlainConfig | PretrainedConfig, max_total_tokens: int | None
) -> Tensor:
    """The table for sequences of up to `max_total_tokens`, or of any length that the model supports."""
    longest = longest_position(config)
    wanted = min(longest, max_total_tokens or longest)
    trained = config.rope_parameters.get("original_max_position_embeddings", longest)
    return rope_table(config, wanted, long_context=(max_total_tokens or 0) > trained)


def rope_kind(config: PlainConfig | PretrainedConfig) -> str:
    """The `rope_type`, one of ROPE_TYPES."""
    parameters = config.rope_parameters
    if not isinstance(parameters, dict) or "rope_type" not in parameters:
        raise UnsupportedModel(
            f"rope_parameters {parameters!r} are not supported: one kind for all layers is"
        )
    kind = str(parameters["rope_type"])
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(
            f"rope_type {kind!r} is not supported; these are: {', '.join(ROPE_TYPES)}"
        )
    return kind


def longest_position(config: PlainConfig | PretrainedConfig) -> int:
    """The number of positions that the encoding supports: the trained ones, extended by the scaling."""
    kind, trained = rope_kind(config), int(config.max_position_embeddings)
    factor = float(config.rope_parameters.get("factor") or 1.0)
    if kind in {"linear", "dynamic"}:
        return int(trained * factor)
    if kind == "yarn":
        original = config.rope_parameters["original_max_position_embeddings"]
        return max(trained, int(original * factor))
    return trained


def _rotations(
    config: PlainConfig | PretrainedConfig, kind: str, positions: Tensor, *, long_context: bool
) -> Tensor:
    """[P, rotary_dim] for `positions` [P]."""
    frequencies, scaling = _frequencies(config, kind, positions, long_context=long_context)
    angles = positions.float().unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * scaling


def _frequencies(
    config: PlainConfig | PretrainedConfig, kind: str, positions: Tensor, *, long_context: bool
) -> tuple[Tensor, float]:
    """Inverse frequencies, one row for all positions or one per position, and the scaling of cosines and sines."""
    if kind == "default":
        return _default_frequencies(config), 1.0
    if kind == "llama3":
        return _llama3_frequencies(config), 1.0
    # The import takes half a second, and the two common kinds do not need it.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    init, cpu = ROPE_INIT_FUNCTIONS[kind], torch.device("cpu")
    frequencies: Tensor
    if kind == "dynamic":
        frequencies, scaling = init(config, cpu, seq_len=(positions + 1).unsqueeze(1))
    elif kind == "longrope":
        original = int(config.rope_parameters["original_max_position_embeddings"])
        short, scaling = init(config, cpu, seq_len=original)
        long, _ = init(config, cpu, seq_len=original + 1)
        is_long = (positions >= original).unsqueeze(1) | long_context
        frequencies = torch.where(is_long, long, short)
    else:
        frequencies, scaling = init(config, cpu)
    return frequencies, float(scaling)


def _default_frequencies(config: PlainConfig | PretrainedConfig) -> Tensor:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary_dim = int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
    steps = torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim
    return 1.0 / (float(config.rope_parameters["rope_theta"]) ** steps)


def _llama3_frequencies(config: PlainConfig | PretrainedConfig) -> Tensor:
    """Llama 3.1's: long waves are stretched, short ones kept, and those in between interpolated."""
    parameters, plain = config.rope_parameters, _default_frequencies(config)
    factor, low, high = (
        float(parameters[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    turns = int(parameters["original_max_position_embeddings"]) / (2 * math.pi / plain)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / factor + kept * plain
