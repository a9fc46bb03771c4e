"""BLOOM: a norm of the embeddings, positions as biases of scores (ALiBi), and feed-forward without gates."""

from __future__ import annotations

import math

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.layer_weights import Activation
from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.gptj import head_width, layer_norm
from millrace_shard.models.spec import (
    AttentionSpec,
    DecoderSpec,
    GatedSpec,
    LayerNames,
    LayerSpec,
    WeightNames,
)

NAMES = WeightNames(
    layer=LayerNames(
        qkv="self_attention.query_key_value",
        out="self_attention.dense",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
    ),
    layers="transformer.h",
    embedding="transformer.word_embeddings",
    norm="transformer.ln_f",
)
MOST_POSITIONS = 32_768
"""That the channels with positions hold."""


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slope of each head; those past a power of two have the odd ones of twice as many (arXiv 2108.12409)."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    more = (2 ** (-4 * (2 * head + 1) / power) for head in range(heads - power))
    return (*slopes, *more)


def check_positions(count: int) -> int:
    """`count`. Raises UnsupportedModel for more positions than keys can hold."""
    if count > MOST_POSITIONS:
        raise UnsupportedModel(
            f"ALiBi of {count} positions is not supported; at most {MOST_POSITIONS}"
        )
    return count


def _spec(config: ConfigReader) -> DecoderSpec:
    # Some published configs have other values of pretraining_tp, which only slow_but_exact follows.
    config.value("pretraining_tp")
    config.check("slow_but_exact", (False,))
    config.check("apply_residual_connection_post_layernorm", (False,))
    heads, hidden_size = config.count("n_head"), config.count("hidden_size")
    head_dim, norm = head_width(heads, hidden_size), layer_norm(config)
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=None,
        slopes=alibi_slopes(heads),
        by_group=True,
        qkv_bias=True,
        out_bias=True,
    )
    mlp = GatedSpec(
        intermediate_size=4 * hidden_size, activation=Activation.PLAIN_GELU_TANH, bias=True
    )
    layer = LayerSpec(attention=attention, feed_forward=mlp, norm=norm)
    return DecoderSpec(
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        layers=(layer,) * config.count("n_layer"),
        norm=norm,
        max_positions=check_positions(config.count("seq_length")),
        tied_head=config.flag("tie_word_embeddings"),
        embedding_norm=norm,
        names=NAMES,
    )


FAMILY = Family(
    model_type="bloom",
    classes=("BloomForCausalLM",),
    spec=_spec,
    defaults={
        "vocab_size": 250_880,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 8,
        # The class lacks the field; the models were trained with this length.
        "seq_length": 2048,
        "layer_norm_epsilon": 1e-5,
        "pretraining_tp": 1,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
    aliases={
        "n_embed": "hidden_size",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    without_effect=("hidden_dropout",),
)
