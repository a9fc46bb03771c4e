"""Names of tensors in transformers' classes and in GGUF files, and the shapes that a config requires."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from millrace_shard.errors import UnsupportedModel, WeightsError
from millrace_shard.weights.gguf.architectures import (
    ATTENTION,
    DELTA_NET,
    DENSE,
    HEAD_NORMS,
    ROUTED,
    Architecture,
)
from millrace_shard.weights.gguf.header import GgufHeader
from millrace_shard.weights.gguf.metadata import Metadata

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+?)(?:\.(weight|bias))?")
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
OUTSIDE = {
    "model.embed_tokens.weight": EMBEDDING,
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": HEAD,
}
ROTATED = ("attn_q", "attn_k")
"""Projections whose rows files of some architectures hold in another order."""
GATE_OF_SHARED = "ffn_gate_inp_shexp"
"""A linear with one output, which files have as a vector."""
RATES, CONVOLUTION, STATE_NORM = "ssm_a", "ssm_conv1d", "ssm_norm"
WHOLE_NAMES = (RATES, "ssm_dt.bias")
"""Tensors that no kind follows."""
OF_EXPERTS = frozenset(
    (
        "ffn_gate_inp",
        *ROUTED.values(),
        "ffn_gate_shexp",
        "ffn_up_shexp",
        "ffn_down_shexp",
        GATE_OF_SHARED,
    )
)


def stored_name(name: str, modules: Mapping[str, str]) -> tuple[str | None, int | None]:
    """The name in the file of the tensor that transformers calls `name`, and the number of its expert, if it has any.

    None stands for a tensor that files do not have.
    """
    if name in OUTSIDE:
        return OUTSIDE[name], None
    layer = LAYER.fullmatch(name)
    if layer is None:
        return None, None
    expert = EXPERT.fullmatch(layer[2])
    module = layer[2] if expert is None else f"{expert[1]}.{expert[3]}"
    if module not in modules:
        return None, None
    stored = _in_layer(int(layer[1]), modules[module], layer[3] or "weight")
    return stored, None if expert is None else int(expert[2])


def _in_layer(layer: int, module: str, suffix: str = "weight") -> str:
    return f"blk.{layer}.{module}" if module in WHOLE_NAMES else f"blk.{layer}.{module}.{suffix}"


def is_rotated(stored: str) -> bool:
    """Whether files of architectures with another order of rows have it in the tensor `stored`."""
    return stored.startswith("blk.") and stored.split(".")[2] in ROTATED


def is_norm(stored: str) -> bool:
    """Whether it is a norm to which files of some architectures add 1."""
    return stored.endswith("norm.weight") and STATE_NORM not in stored


def biased(header: GgufHeader, architecture: Architecture) -> tuple[dict[str, bool], list[str]]:
    """The fields of config.json about biases, by the first layer, and the linears that have biases."""
    fields = {
        name: f"blk.0.{linears[0]}.bias" in header.tensors
        for name, linears in architecture.biases.items()
    }
    optional = (
        each for name, linears in architecture.biases.items() if fields[name] for each in linears
    )
    return fields, [*architecture.always_biased, *optional]


def check_tensors(
    header: GgufHeader, config: Mapping[str, Any], architecture: Architecture
) -> None:
    """Raise unless the file has exactly the tensors of a model with this config, in the right shapes.

    A tensor that the decoder does not know would change the model if it were left out: UnsupportedModel.
    """
    expected = dict(_shapes(header, config, architecture))
    for name, shape in expected.items():
        tensor = header.tensors.get(name)
        if tensor is None:
            raise WeightsError(f"tensor {name} is missing from {header.path.name}")
        if tensor.shape != shape and (*tensor.shape, 1) != shape[::-1]:
            raise WeightsError(
                f"tensor {name} in {header.path.name} has shape {list(tensor.shape)},"
                f" its metadata says {list(shape)}"
            )
    factors = {ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS}
    extra = sorted(header.tensors.keys() - expected.keys() - factors - _behind(header, config))
    if extra:
        raise UnsupportedModel(
            f"{header.path.name} has tensor {extra[0]}, which is not supported for {config['model_type']}"
        )


def _behind(header: GgufHeader, config: Mapping[str, Any]) -> set[str]:
    """Tensors of layers behind the last one, which the metadata says predict further tokens."""
    metadata = Metadata(header.metadata, header.path.name)
    count = metadata.needed(f"{metadata.text('general.architecture')}.block_count")
    layers = range(config["num_hidden_layers"], count)
    prefixes = tuple(f"blk.{layer}." for layer in layers)
    return {name for name in header.tensors if name.startswith(prefixes)}


def _shapes(
    header: GgufHeader, config: Mapping[str, Any], architecture: Architecture
) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield EMBEDDING, (vocabulary, hidden)
    yield "output_norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield HEAD, (vocabulary, hidden)
    has_experts = "num_experts_per_tok" in config
    modules = set(architecture.modules.values()) - (set(DENSE) if has_experts else OF_EXPERTS)
    weights = _layer_shapes(config, architecture)
    _, biases = biased(header, architecture)
    attention = {*ATTENTION.values(), *HEAD_NORMS.values()}
    recurrent = set(DELTA_NET.values())
    for number in range(config["num_hidden_layers"]):
        absent: set[str] = set()
        if architecture.is_hybrid:
            is_full = config["layer_types"][number] == "full_attention"
            absent = recurrent if is_full else attention
        for name in modules - absent:
            yield _in_layer(number, name), weights[name]
        for name in biases:
            yield f"blk.{number}.{name}.bias", weights[name][:-1]


def _layer_shapes(
    config: Mapping[str, Any], architecture: Architecture
) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, kv_heads * head_dim
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    width = config.get("moe_intermediate_size") or inner
    shared = config.get("shared_expert_intermediate_size") or 0
    of_heads = (queries, keys) if architecture.whole_head_norms else (head_dim, head_dim)
    is_fused = "mlp.gate_up_proj" in architecture.modules
    return {
        **{name: (hidden,) for name in architecture.modules.values() if name.endswith("norm")},
        "attn_q_norm": of_heads[:1],
        "attn_k_norm": of_heads[1:],
        "attn_q": (2 * queries if architecture.is_hybrid else queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_qkv": (queries + 2 * keys, hidden),
        "attn_output": (hidden, queries),
        **(_delta_net_shapes(config) if architecture.is_hybrid else {}),
        "attn_sinks": (heads,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (2 * inner if is_fused else inner, hidden),
        "ffn_down": (hidden, inner),
        "ffn_gate_inp": (experts, hidden),
        "ffn_gate_exps": (experts, width, hidden),
        "ffn_up_exps": (experts, width, hidden),
        "ffn_down_exps": (experts, hidden, width),
        "ffn_gate_shexp": (shared, hidden),
        "ffn_up_shexp": (shared, hidden),
        "ffn_down_shexp": (hidden, shared),
        GATE_OF_SHARED: (1, hidden),
    }


def _delta_net_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, keys = config["hidden_size"], config["linear_num_key_heads"]
    values, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    inner = values * value_dim
    channels = 2 * keys * config["linear_key_head_dim"] + inner
    return {
        "attn_qkv": (channels, hidden),
        "attn_gate": (inner, hidden),
        "ssm_beta": (values, hidden),
        "ssm_alpha": (values, hidden),
        CONVOLUTION: (channels, config["linear_conv_kernel_dim"]),
        RATES: (values,),
        "ssm_dt.bias": (values,),
        STATE_NORM: (value_dim,),
        "ssm_out": (hidden, inner),
    }
