"""Ministral 3: Mistral with yarn, and queries that grow with their position as in Llama 4."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.config import LARGEST_COUNT, ConfigReader, is_number, rope_parameters
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.llama import llama_attention, llama_decoder
from millrace_shard.models.spec import DecoderSpec, QueryScaling

_OWN = frozenset(("llama_4_scaling_beta", "max_position_embeddings"))


def _spec(config: ConfigReader) -> DecoderSpec:
    attention = replace(
        llama_attention(config, rope_extra=_OWN),
        query_scaling=_query_scaling(config),
        window=config.optional_count("sliding_window"),
    )
    return llama_decoder(config, [attention] * config.count("num_hidden_layers"))


def _query_scaling(config: ConfigReader) -> QueryScaling:
    parameters = rope_parameters(config)
    beta = parameters.get("llama_4_scaling_beta")
    original = parameters.get("original_max_position_embeddings")
    if not is_number(beta) or type(original) is not int or not 1 <= original <= LARGEST_COUNT:
        raise UnsupportedModel(
            "rope_parameters of ministral3 have to have llama_4_scaling_beta and"
            f" original_max_position_embeddings, not {beta!r} and {original!r}"
        )
    return QueryScaling(beta=float(beta), positions=original)


FAMILY = Family(
    model_type="ministral3",
    classes=("Ministral3ForCausalLM",),
    spec=_spec,
    defaults={
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "eos_token_id": 2,
    },
)
