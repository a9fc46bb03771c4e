"""Gemma 1: Llama with norms whose weights count from 1, scaled embeddings, and gated GELU."""

from __future__ import annotations

from millrace_shard.kernels.layer_weights import Activation
from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import activation
from millrace_shard.models.families.llama import llama_attention
from millrace_shard.models.spec import DecoderSpec, GatedSpec, LayerSpec, NormSpec


def _spec(config: ConfigReader) -> DecoderSpec:
    config.check("use_bidirectional_attention", (False,))
    norm = NormSpec(eps=config.number("rms_norm_eps"), plus_one=True, wide=True)
    # Published configs name the exact function, and mean its approximation, as transformers does.
    is_legacy = config.value("hidden_act") == "gelu"
    mlp = GatedSpec(
        intermediate_size=config.count("intermediate_size"),
        activation=Activation.GELU_TANH if is_legacy else activation(config),
    )
    attention = llama_attention(config, bias=config.flag("attention_bias"))
    layer = LayerSpec(attention=attention, feed_forward=mlp, norm=norm)
    hidden_size = config.count("hidden_size")
    return DecoderSpec(
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        layers=(layer,) * config.count("num_hidden_layers"),
        norm=norm,
        max_positions=config.count("max_position_embeddings"),
        tied_head=config.flag("tie_word_embeddings"),
        embedding_multiplier=hidden_size**0.5,
    )


FAMILY = Family(
    model_type="gemma",
    classes=("GemmaForCausalLM",),
    spec=_spec,
    defaults={
        "vocab_size": 256_000,
        "hidden_size": 3072,
        "intermediate_size": 24_576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
)
