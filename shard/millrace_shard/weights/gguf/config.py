"""The config.json of the model in a GGUF file, from its metadata; what is not understood is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from millrace_shard.errors import UnsupportedModel, WeightsError
from millrace_shard.weights.gguf.header import GgufHeader
from millrace_shard.weights.gguf.metadata import Metadata
from millrace_shard.weights.gguf.tensor_names import EMBEDDING, HEAD, ROPE_FACTORS

DEFAULT_THETA = 10000.0
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The parameters of all published models of this kind; the files hold only the factors that follow from them."""
TOLERANCE = 1e-4


def rope_parameters(
    metadata: Metadata, arch: str, config: Mapping[str, Any], factors: Tensor | None
) -> dict[str, Any]:
    """`rope_parameters` of a config.json; `factors` [head_dim / 2] divide the frequencies.

    Raises UnsupportedModel for scalings that transformers does not have.
    """
    theta = metadata.number(f"{arch}.rope.freq_base") or DEFAULT_THETA
    scaling = _scaling(metadata, arch, config)
    if factors is None or (factors == 1).all():
        return {"rope_theta": theta, **scaling}
    if scaling["rope_type"] != "default":
        raise UnsupportedModel(
            f"{arch}.rope.scaling.type={scaling['rope_type']!r} with a tensor {ROPE_FACTORS} is not supported"
        )
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {"rope_theta": theta, **_llama3(factors.float(), theta, head_dim)}


def _scaling(metadata: Metadata, arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    prefix = f"{arch}.rope.scaling"
    kind = metadata.text(f"{prefix}.type")
    factor = metadata.number(f"{prefix}.factor") or metadata.number(f"{arch}.rope.scale_linear")
    original = metadata.count(f"{prefix}.original_context_length")
    for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if metadata.number(f"{prefix}.{name}") not in (None, 1.0):
            raise UnsupportedModel(f"{metadata.describe(f'{prefix}.{name}')} is not supported")
    betas = {name: metadata.number(f"{prefix}.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    if kind == "none" or factor in (None, 1.0):
        if kind not in (None, "none", "linear", "yarn"):
            raise UnsupportedModel(f"{prefix}.type={kind!r} is not supported")
        return {"rope_type": "default"}
    assert factor is not None
    if kind in (None, "linear") and factor >= 1:
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and factor >= 1:
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original or config["max_position_embeddings"],
            **{name: beta for name, beta in betas.items() if beta is not None},
        }
    raise UnsupportedModel(
        f"{prefix}.type={kind!r} with {prefix}.factor={factor} is not supported;"
        " linear and yarn with factors from 1 are"
    )


def _llama3(factors: Tensor, theta: float, head_dim: int) -> dict[str, Any]:
    if factors.shape != (head_dim // 2,):
        raise WeightsError(
            f"tensor {ROPE_FACTORS} has shape {list(factors.shape)}, and heads have {head_dim} channels"
        )
    factor = float(factors.max())
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    turns = LLAMA3["original_max_position_embeddings"] / (2 * math.pi * theta**exponents)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - share) / factor + share)
    if not torch.allclose(factors.double(), expected, rtol=TOLERANCE, atol=0):
        raise UnsupportedModel(
            f"tensor {ROPE_FACTORS} holds factors other than Llama 3.1's, which are not supported"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""A Mistral model has the architecture llama."""
LONGEST_CONTEXT = 10_485_760
WITHOUT_EFFECT = ("rope.scaling.finetuned", "tensor_data_layout")
NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "pooling_type": 0}
"""Counts with the value that has no effect."""


def model_config(
    header: GgufHeader, metadata: Metadata, rope_factors: Tensor | None
) -> dict[str, Any]:
    """The object of a config.json without token ids; `rope_factors` is the tensor rope_freqs.weight, if any.

    Raises UnsupportedModel for another architecture or an unknown key, and WeightsError for wrong values.
    """
    arch = metadata.text("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{header.path.name} has the architecture {arch!r}; these are supported: {', '.join(ARCHITECTURES)}"
        )
    config = _sizes(header, metadata, arch)
    config |= _family(header, metadata, arch)
    config["architectures"] = [CLASSES[config["model_type"]]]
    config["rope_parameters"] = rope_parameters(metadata, arch, config, rope_factors)
    _refuse_unknown(metadata, arch)
    return config


def _sizes(header: GgufHeader, metadata: Metadata, arch: str) -> dict[str, Any]:
    def needed(name: str) -> int:
        return metadata.needed(f"{arch}.{name}")

    embedding = header.tensors.get(EMBEDDING)
    if embedding is None:
        raise WeightsError(f"tensor {EMBEDDING} is missing from {header.path.name}")
    epsilon = metadata.number(f"{arch}.attention.layer_norm_rms_epsilon")
    if epsilon is None:
        raise WeightsError(f"{header.path.name} has no {arch}.attention.layer_norm_rms_epsilon")
    heads = needed("attention.head_count")
    context = needed("context_length")
    if context > LONGEST_CONTEXT:
        raise WeightsError(
            f"{header.path.name}: {arch}.context_length={context}; at most {LONGEST_CONTEXT} is allowed"
        )
    return {
        "vocab_size": metadata.count(f"{arch}.vocab_size") or embedding.shape[0],
        "hidden_size": needed("embedding_length"),
        "intermediate_size": needed("feed_forward_length"),
        "num_hidden_layers": needed("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count(f"{arch}.attention.head_count_kv") or heads,
        "max_position_embeddings": context,
        "rms_norm_eps": epsilon,
        "hidden_act": "silu",
        "tie_word_embeddings": HEAD not in header.tensors,
        "dtype": _dtype(header),
    }


def _family(header: GgufHeader, metadata: Metadata, arch: str) -> dict[str, Any]:
    head_dim = _head_dim(metadata, arch)
    if arch == "qwen2":
        return {"model_type": arch, "use_sliding_window": False}
    if arch == "qwen3":
        return {"model_type": arch, "head_dim": head_dim, "use_sliding_window": False}
    window = metadata.count("llama.attention.sliding_window")
    if window:
        return {"model_type": "mistral", "head_dim": head_dim, "sliding_window": window}
    return {
        "model_type": arch,
        "head_dim": head_dim,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
    }


def _head_dim(metadata: Metadata, arch: str) -> int:
    """The width of a head, which several keys repeat."""
    hidden = metadata.needed(f"{arch}.embedding_length")
    heads = metadata.needed(f"{arch}.attention.head_count")
    plain = hidden // heads
    head_dim = metadata.count(f"{arch}.attention.key_length") or plain
    repeated = ("attention.value_length", "rope.dimension_count")
    widths = [metadata.count(f"{arch}.{name}") or head_dim for name in repeated]
    if any(width != head_dim for width in widths) or (arch == "qwen2" and head_dim != plain):
        raise UnsupportedModel(
            f"{arch}: heads of {hidden}/{heads} channels with {arch}.attention.key_length={head_dim},"
            f" {arch}.attention.value_length={widths[0]} and {arch}.rope.dimension_count={widths[1]} are not supported"
        )
    if head_dim % 2 or not head_dim:
        raise WeightsError(f"{arch}: heads of {head_dim} channels cannot be rotated in pairs")
    return head_dim


def _dtype(header: GgufHeader) -> str:
    """The dtype of a weight; bfloat16 for one in quantised blocks."""
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    matrices = [t.format.name for t in header.tensors.values() if len(t.shape) > 1]
    kinds = {names.get(name, "bfloat16") for name in matrices}
    return kinds.pop() if len(kinds) == 1 else "bfloat16"


def _refuse_unknown(metadata: Metadata, arch: str) -> None:
    """Raise UnsupportedModel for the first key of the architecture that is neither understood nor without effect."""
    for name, neutral in NEUTRAL.items():
        key = f"{arch}.{name}"
        if metadata.count(key) not in (None, neutral):
            raise UnsupportedModel(f"{metadata.describe(key)} is not supported for {arch}")
    if metadata.flag(f"{arch}.attention.causal") is False:
        raise UnsupportedModel(f"{arch}.attention.causal=False is not supported for {arch}")
    without_effect = {f"{arch}.{name}" for name in WITHOUT_EFFECT}
    for key in metadata.unread(f"{arch}."):
        if key not in without_effect:
            raise UnsupportedModel(f"{metadata.describe(key)} is not supported for {arch}")
