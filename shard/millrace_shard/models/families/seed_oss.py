"""Seed-OSS: Llama with biases of queries, keys and values, and a separate width of heads."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.llama import llama_attention, llama_decoder
from millrace_shard.models.spec import DecoderSpec


def _spec(config: ConfigReader) -> DecoderSpec:
    attention = replace(
        llama_attention(config),
        qkv_bias=config.flag("attention_bias"),
        out_bias=config.flag("attention_out_bias"),
    )
    layers = [attention] * config.count("num_hidden_layers")
    return llama_decoder(config, layers, mlp_bias=config.flag("mlp_bias"))


FAMILY = Family(
    model_type="seed_oss",
    classes=("SeedOssForCausalLM",),
    spec=_spec,
    defaults={
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 524_288,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "eos_token_id": 2,
    },
    without_effect=("residual_dropout",),
)
