"""ERNIE 4.5 dense: Llama with interleaved rotary embeddings."""

from __future__ import annotations

from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.llama import llama_attention, llama_decoder
from millrace_shard.models.spec import DecoderSpec


def _spec(config: ConfigReader) -> DecoderSpec:
    bias = config.flag("use_bias")
    attention = llama_attention(config, bias=bias, interleaved=True)
    return llama_decoder(config, [attention] * config.count("num_hidden_layers"), mlp_bias=bias)


FAMILY = Family(
    model_type="ernie4_5",
    classes=("Ernie4_5ForCausalLM",),
    spec=_spec,
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
)
