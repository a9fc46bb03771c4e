"""OLMo 3: OLMo 2 with a window on three of four layers, and a scaling of rotary embeddings on the others."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import window_kinds
from millrace_shard.models.families.olmo2 import olmo_attention, olmo_decoder
from millrace_shard.models.spec import DecoderSpec


def _spec(config: ConfigReader) -> DecoderSpec:
    kinds, window = window_kinds(config, 4), config.count("sliding_window")
    attention = {
        kind: replace(
            olmo_attention(config, kind), window=window if kind == "sliding_attention" else None
        )
        for kind in set(kinds)
    }
    return olmo_decoder(config, [attention[kind] for kind in kinds])


FAMILY = Family(
    model_type="olmo3",
    classes=("Olmo3ForCausalLM",),
    spec=_spec,
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "rope_theta": 500_000.0,
        "eos_token_id": 50_279,
    },
)
