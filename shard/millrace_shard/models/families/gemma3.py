"""Gemma 3, its text part too: Gemma 2 without soft caps, with norms of heads, and two kinds of rotary embeddings."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import window_kinds
from millrace_shard.models.families.gemma2 import gemma_attention, gemma_decoder
from millrace_shard.models.spec import DecoderSpec, HeadNormSpec, NormSpec

_THETA_FIELDS = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}


def _spec(config: ConfigReader) -> DecoderSpec:
    config.check("use_bidirectional_attention", (False,))
    # The class in transformers has the field, and passes it to no attention.
    config.check("attn_logit_softcapping", ())
    norm = NormSpec(eps=config.number("rms_norm_eps"), plus_one=True, wide=True)
    kinds = window_kinds(config, config.count("sliding_window_pattern"))
    window = config.count("sliding_window")
    attention = {
        kind: replace(
            gemma_attention(config, kind, _THETA_FIELDS[kind]),
            window=window if kind == "sliding_attention" else None,
            head_norm=HeadNormSpec(norm=norm),
        )
        for kind in set(kinds)
    }
    return gemma_decoder(config, [attention[kind] for kind in kinds])


FAMILY = Family(
    model_type="gemma3_text",
    classes=("Gemma3ForCausalLM",),
    spec=_spec,
    defaults={
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
)
