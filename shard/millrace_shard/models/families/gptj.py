"""GPT-J: one norm before both halves, a part of the channels rotated in pairs, and feed-forward without gates."""

from __future__ import annotations

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.layer_weights import Activation
from millrace_shard.models.config import ConfigReader, rope_parameters
from millrace_shard.models.families.family import Family
from millrace_shard.models.rope_spec import RopeSpec
from millrace_shard.models.spec import (
    AttentionSpec,
    DecoderSpec,
    GatedSpec,
    LayerNames,
    LayerSpec,
    NormPlaces,
    NormSpec,
    WeightNames,
)

PLAIN_GELUS = {
    "gelu": Activation.PLAIN_GELU,
    "gelu_new": Activation.PLAIN_GELU_TANH,
    "gelu_pytorch_tanh": Activation.PLAIN_GELU_TANH,
}
"""By the names of functions in configs of families without gates."""
NAMES = WeightNames(
    layer=LayerNames(
        query="attn.q_proj",
        key="attn.k_proj",
        value="attn.v_proj",
        out="attn.out_proj",
        up="mlp.fc_in",
        down="mlp.fc_out",
        before_attention="ln_1",
        before_mlp=None,
    ),
    layers="transformer.h",
    embedding="transformer.wte",
    norm="transformer.ln_f",
)


def plain_gelu(config: ConfigReader, field: str) -> Activation:
    name = config.value(field)
    if not isinstance(name, str) or name not in PLAIN_GELUS:
        raise UnsupportedModel(f"{field}={name!r} is not supported for {config.model_type}")
    return PLAIN_GELUS[name]


def layer_norm(config: ConfigReader, field: str = "layer_norm_epsilon") -> NormSpec:
    """A LayerNorm with a bias."""
    return NormSpec(eps=config.number(field), centred=True, wide=True, bias=True)


def head_width(heads: int, hidden_size: int) -> int:
    """Channels of a head. Raises UnsupportedModel if they are no whole number."""
    if hidden_size % heads:
        raise UnsupportedModel(f"{heads} heads do not divide hidden_size={hidden_size}")
    return hidden_size // heads


def _spec(config: ConfigReader) -> DecoderSpec:
    heads, hidden_size = config.count("n_head"), config.count("n_embd")
    head_dim, rotary_dim = head_width(heads, hidden_size), config.count("rotary_dim")
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise UnsupportedModel(f"rotary_dim={rotary_dim} of heads of {head_dim}")
    if rope_parameters(config):
        raise UnsupportedModel("rope_parameters are not supported for gptj")
    positions = config.count("n_positions")
    mlp = GatedSpec(
        intermediate_size=config.optional_count("n_inner") or 4 * hidden_size,
        activation=plain_gelu(config, "activation_function"),
        bias=True,
    )
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=RopeSpec(
            rotary_dim=rotary_dim, theta=10_000.0, max_positions=positions, interleaved=True
        ),
    )
    norm = layer_norm(config)
    layer = LayerSpec(
        attention=attention, feed_forward=mlp, norm=norm, norm_places=NormPlaces.PARALLEL
    )
    return DecoderSpec(
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        layers=(layer,) * config.count("n_layer"),
        norm=norm,
        max_positions=positions,
        tied_head=config.flag("tie_word_embeddings"),
        head_bias=True,
        names=NAMES,
    )


FAMILY = Family(
    model_type="gptj",
    classes=("GPTJForCausalLM",),
    spec=_spec,
    defaults={
        "vocab_size": 50_400,
        "n_positions": 2048,
        "n_embd": 4096,
        "n_layer": 28,
        "n_head": 16,
        "rotary_dim": 64,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "eos_token_id": 50_256,
    },
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    without_effect=("attn_pdrop", "embd_pdrop", "resid_pdrop"),
)
