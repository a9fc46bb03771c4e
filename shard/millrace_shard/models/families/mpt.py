"""MPT: LayerNorms without biases, positions as biases of scores (ALiBi), and feed-forward without gates."""

from __future__ import annotations

import math

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.layer_weights import Activation
from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.bloom import check_positions
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.gptj import head_width
from millrace_shard.models.spec import (
    AttentionSpec,
    DecoderSpec,
    GatedSpec,
    LayerNames,
    LayerSpec,
    NormSpec,
    WeightNames,
)

NAMES = WeightNames(
    layer=LayerNames(
        qkv="attn.Wqkv",
        out="attn.out_proj",
        up="ffn.up_proj",
        down="ffn.down_proj",
        before_attention="norm_1",
        before_mlp="norm_2",
    ),
    layers="transformer.blocks",
    embedding="transformer.wte",
    norm="transformer.norm_f",
)
OF_ATTENTION = {
    "attn_type": ("multihead_attention",),
    "alibi": (True,),
    "alibi_bias_max": (8,),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "attn_uses_sequence_id": (False,),
}
"""Fields of `attn_config` with the values that the class in transformers computes."""


def _slopes(heads: int) -> tuple[float, ...]:
    power = 2 ** math.ceil(math.log2(heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return tuple(slopes if power == heads else [*slopes[1::2], *slopes[::2]][:heads])


def _spec(config: ConfigReader) -> DecoderSpec:
    config.check("no_bias", (True,))
    config.check("expansion_ratio", (4,))
    config.check("logit_scale", ())
    fields = config.value("attn_config") or {}
    if not isinstance(fields, dict):
        raise UnsupportedModel(f"attn_config={fields!r} must be an object")
    own = ConfigReader(fields, {"model_type": "mpt", "alibi": True})
    for name, allowed in OF_ATTENTION.items():
        own.check(name, allowed)
    heads, hidden_size = config.count("n_heads"), config.count("d_model")
    head_dim = head_width(heads, hidden_size)
    norm = NormSpec(eps=config.number("layer_norm_epsilon"), centred=True, wide=True)
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        scale=own.optional_number("softmax_scale") or head_dim**-0.5,
        rope=None,
        slopes=_slopes(heads),
        clip=own.optional_number("clip_qkv"),
    )
    mlp = GatedSpec(intermediate_size=4 * hidden_size, activation=Activation.PLAIN_GELU)
    return DecoderSpec(
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        layers=(LayerSpec(attention=attention, feed_forward=mlp, norm=norm),)
        * config.count("n_layers"),
        norm=norm,
        max_positions=check_positions(config.count("max_seq_len")),
        tied_head=config.flag("tie_word_embeddings"),
        names=NAMES,
    )


FAMILY = Family(
    model_type="mpt",
    classes=("MptForCausalLM", "MPTForCausalLM"),
    spec=_spec,
    defaults={
        "d_model": 2048,
        "n_heads": 16,
        "n_layers": 24,
        "expansion_ratio": 4,
        "max_seq_len": 2048,
        "vocab_size": 50_368,
        "layer_norm_epsilon": 1e-5,
        "no_bias": True,
        "tie_word_embeddings": True,
    },
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    },
    # The class has no learned positions, whatever the field says.
    without_effect=(
        *("emb_pdrop", "resid_pdrop", "embedding_fraction", "init_device"),
        *("learned_pos_emb", "norm_type"),
    ),
)
