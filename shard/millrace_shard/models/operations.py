"""Which operations of a decoder have no operator of the kernels."""

from __future__ import annotations

from millrace_shard.kernels.layer.activation import Activation
from millrace_shard.models.spec.decoder_spec import DecoderSpec, LayerSpec
from millrace_shard.models.spec.feed_forward_spec import ExpertsSpec
from millrace_shard.models.spec.norm_spec import NormSpec


def uses_plain_torch(spec: DecoderSpec) -> bool:
    """Whether norms, rotations or activations are composed in plain torch.

    On CUDA the order of torch's sums over a row may depend on the number of rows.
    """
    return not (_is_plain_norm(spec.norm) and all(map(_is_plain_layer, set(spec.layers))))


def _is_plain_layer(layer: LayerSpec) -> bool:
    attention, head_norm = layer.attention, layer.attention.head_norm
    rotates = attention.rope is not None and not attention.rope.interleaved
    heads_are = head_norm is None or (
        _is_plain_norm(head_norm.norm)
        and not (head_norm.whole_width or head_norm.weight_per_head or head_norm.after_rope)
    )
    mlp = layer.feed_forward
    if isinstance(mlp, ExpertsSpec):
        is_silu = mlp.activation is not Activation.GELU_TANH
        if mlp.shared is not None:
            is_silu &= mlp.shared.mlp.activation is Activation.SILU and not mlp.shared.gated
    else:
        is_silu = mlp.activation is Activation.SILU
    is_plain = rotates and attention.query_scaling is None and is_silu
    return is_plain and heads_are and _is_plain_norm(layer.norm)


def _is_plain_norm(norm: NormSpec) -> bool:
    return not (norm.centred or norm.plus_one or norm.wide)
