"""Granite 3 and 4 dense: Llama with multipliers of embeddings, scores, residual summands and logits."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.llama import llama_attention, llama_decoder
from millrace_shard.models.spec import DecoderSpec


def _spec(config: ConfigReader) -> DecoderSpec:
    multiplier = config.number("residual_multiplier")
    attention = replace(
        llama_attention(config, bias=config.flag("attention_bias")),
        scale=config.number("attention_multiplier"),
    )
    layers = [attention] * config.count("num_hidden_layers")
    spec = llama_decoder(config, layers, mlp_bias=config.flag("mlp_bias"))
    return replace(
        spec,
        layers=tuple(replace(layer, residual_multiplier=multiplier) for layer in spec.layers),
        embedding_multiplier=config.number("embedding_multiplier"),
        logit_multiplier=1 / config.number("logits_scaling"),
    )


FAMILY = Family(
    model_type="granite",
    classes=("GraniteForCausalLM",),
    spec=_spec,
    defaults={
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "eos_token_id": 2,
    },
)
