"""Fields that families with experts have in common, and layers of two kinds of feed-forward halves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.expert_weights import RoutingRule, Scoring
from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.llama import llama_decoder
from millrace_shard.models.spec import AttentionSpec, DecoderSpec, ExpertsSpec

OF_TRAINING = ("output_router_logits", "router_aux_loss_coef")
"""Fields that do not change a forward pass."""


def experts_per_token(config: ConfigReader, count: int) -> int:
    top_k = config.count("num_experts_per_tok")
    if top_k > count:
        raise UnsupportedModel(f"num_experts_per_tok={top_k} of {count} experts")
    return top_k


def softmax_rule(config: ConfigReader, count: int, *, renormalise: bool) -> RoutingRule:
    return RoutingRule(
        top_k=experts_per_token(config, count), scoring=Scoring.SOFTMAX, renormalise=renormalise
    )


def qwen_is_sparse(config: ConfigReader) -> list[bool]:
    """Whether each layer has experts: every `decoder_sparse_step`-th, except `mlp_only_layers`."""
    num_layers, step = config.count("num_hidden_layers"), config.count("decoder_sparse_step")
    dense = config.value("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise UnsupportedModel(f"mlp_only_layers={dense!r} must be a list of layers")
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]


def mixture_decoder(
    config: ConfigReader,
    attention: Sequence[AttentionSpec],
    experts: ExpertsSpec,
    is_sparse: Sequence[bool],
) -> DecoderSpec:
    """A decoder like Llama's, in which the layers that `is_sparse` names have `experts`."""
    spec = llama_decoder(config, attention)
    layers = (
        replace(layer, feed_forward=experts) if sparse else layer
        for layer, sparse in zip(spec.layers, is_sparse, strict=True)
    )
    return replace(spec, layers=tuple(layers))
