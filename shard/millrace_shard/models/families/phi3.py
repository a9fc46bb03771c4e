"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama with fused projections, longrope and partial rotary embeddings."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.llama import llama_attention, llama_decoder
from millrace_shard.models.spec import DecoderSpec, LayerNames, WeightNames


def _spec(config: ConfigReader) -> DecoderSpec:
    attention = replace(
        llama_attention(config, may_be_partial=True),
        window=config.optional_count("sliding_window"),
    )
    spec = llama_decoder(config, [attention] * config.count("num_hidden_layers"))
    layer = LayerNames(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")
    return replace(spec, names=WeightNames(layer=layer))


FAMILY = Family(
    model_type="phi3",
    classes=("Phi3ForCausalLM",),
    spec=_spec,
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "eos_token_id": 32_000,
    },
    # The rope of every layer reads the last one, if it has a scaling.
    without_effect=("resid_pdrop", "embd_pdrop", "original_max_position_embeddings"),
)
