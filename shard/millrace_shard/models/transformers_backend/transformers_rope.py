"""The rotary embedding in a config of `transformers`, as a RopeSpec."""

from __future__ import annotations

from transformers import PretrainedConfig

from millrace_shard.models.config.config_reader import ConfigReader
from millrace_shard.models.config.rope_fields import read_rope
from millrace_shard.models.rope import longest_position
from millrace_shard.models.spec.rope_spec import DynamicScaling, LongRopeScaling, RopeSpec


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
    """The number of positions that the model supports."""
    rope = rope_of(config)
    return int(config.max_position_embeddings) if rope is None else longest_position(rope)
