"""The config.json of the model in a GGUF file, from its metadata; what is not understood is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from millrace_shard.errors import UnsupportedModel, WeightsError
from millrace_shard.weights.gguf.architectures import (
    ARCHITECTURES,
    Architecture,
    Source,
)
from millrace_shard.weights.gguf.header import GgufHeader
from millrace_shard.weights.gguf.metadata import Metadata
from millrace_shard.weights.gguf.tensor_names import (
    EMBEDDING,
    HEAD,
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    biased,
)

DEFAULT_THETA = 10000.0
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The parameters of all published models of this kind; the files hold only the factors that follow from them."""
TOLERANCE = 1e-4


def rope_parameters(
    metadata: Metadata, arch: str, config: Mapping[str, Any], factors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """`rope_parameters` of a config.json; `factors` [rotated channels / 2], by their tensors, divide the frequencies.

    Raises UnsupportedModel for scalings that transformers does not have.
    """
    theta = metadata.number(f"{arch}.rope.freq_base") or DEFAULT_THETA
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotated = metadata.count(f"{arch}.rope.dimension_count") or head_dim
    scaling = _scaling(metadata, arch, config, factors)
    if rotated != head_dim:
        scaling["partial_rotary_factor"] = rotated / head_dim
    for name, tensor in factors.items():
        if tensor.shape != (rotated // 2,):
            raise WeightsError(
                f"tensor {name} has shape {list(tensor.shape)}, and {rotated} channels of a head are rotated"
            )
    common = factors.get(ROPE_FACTORS)
    if common is not None and not (common == 1).all():
        if scaling["rope_type"] != "default":
            raise UnsupportedModel(
                f"{arch}.rope.scaling.type={scaling['rope_type']!r} with a tensor {ROPE_FACTORS} is not supported"
            )
        scaling |= _llama3(common.float(), theta, rotated)
    if ARCHITECTURES[arch].has_axes:
        scaling |= _axes(metadata, arch)
    return _by_kind(metadata, arch, config, {"rope_theta": theta, **scaling})


def _axes(metadata: Metadata, arch: str) -> dict[str, Any]:
    """The channels of each axis, which files pad to four."""
    key = f"{arch}.rope.dimension_sections"
    sections = metadata.counts(key)
    if sections is None:
        return {}
    if len(sections) not in {3, 4} or any(sections[3:]):
        raise UnsupportedModel(f"{metadata.describe(key)} must be three whole numbers")
    return {"mrope_section": sections[:3]}


def _by_kind(
    metadata: Metadata, arch: str, config: Mapping[str, Any], parameters: dict[str, Any]
) -> dict[str, Any]:
    """The parameters for each kind of layer, where kinds differ in families of transformers."""
    local = metadata.number(f"{arch}.rope.freq_base_swa")
    if config["model_type"] in ("gemma3_text", "olmo3"):
        theta = parameters["rope_theta"] if config["model_type"] == "olmo3" else DEFAULT_THETA
        window = {"rope_type": "default", "rope_theta": local or theta}
        return {"full_attention": parameters, "sliding_attention": window}
    if local not in (None, parameters["rope_theta"]):
        raise UnsupportedModel(
            f"{metadata.describe(f'{arch}.rope.freq_base_swa')} is not supported"
        )
    return parameters


def _scaling(
    metadata: Metadata, arch: str, config: Mapping[str, Any], factors: Mapping[str, Tensor]
) -> dict[str, Any]:
    if LONG_FACTORS in factors or SHORT_FACTORS in factors:
        return _longrope(metadata, arch, config, factors)
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
            **({"truncate": False} if config["model_type"] == "gpt_oss" else {}),
        }
    raise UnsupportedModel(
        f"{prefix}.type={kind!r} with {prefix}.factor={factor} is not supported;"
        " linear and yarn with factors from 1 are"
    )


def _longrope(
    metadata: Metadata, arch: str, config: Mapping[str, Any], factors: Mapping[str, Tensor]
) -> dict[str, Any]:
    prefix = f"{arch}.rope.scaling"
    if factors.keys() != {LONG_FACTORS, SHORT_FACTORS}:
        raise WeightsError(
            f"the file has {', '.join(factors)} of {LONG_FACTORS} and {SHORT_FACTORS}"
        )
    if (kind := metadata.text(f"{prefix}.type")) not in (None, "longrope"):
        raise UnsupportedModel(
            f"{prefix}.type={kind!r} with a tensor {LONG_FACTORS} is not supported"
        )
    original = metadata.count(f"{prefix}.original_context_length")
    original = original or config["max_position_embeddings"]
    fields = {
        "rope_type": "longrope",
        "short_factor": factors[SHORT_FACTORS].tolist(),
        "long_factor": factors[LONG_FACTORS].tolist(),
        "original_max_position_embeddings": original,
        "factor": config["max_position_embeddings"] / original,
    }
    attention = metadata.number(f"{prefix}.attn_factor")
    return fields if attention is None else {**fields, "attention_factor": attention}


def _llama3(factors: Tensor, theta: float, head_dim: int) -> dict[str, Any]:
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


LONGEST_CONTEXT = 10_485_760
WITHOUT_EFFECT = ("rope.scaling.finetuned", "tensor_data_layout")
EPSILONS = {"rms_norm_eps": "layer_norm_rms_epsilon", "layer_norm_eps": "layer_norm_epsilon"}
"""Keys by the fields of config.json."""
NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "pooling_type": 0}
"""Counts with the value that has no effect."""


CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2VLForConditionalGeneration",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl_text": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe_text": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
"""Classes of transformers by `model_type`."""


def architecture_of(metadata: Metadata, name: str) -> Architecture:
    """Of the file `name`. Raises UnsupportedModel, with the supported ones."""
    arch = metadata.text("general.architecture")
    if arch == "clip":
        raise UnsupportedModel(f"{name} is for images (mmproj); name the file of the text model")
    if arch not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{name} has the architecture {arch!r}; these are supported: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[arch]


def model_config(
    header: GgufHeader, metadata: Metadata, factors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The object of a config.json without token ids; `factors` are tensors of rotary embeddings, if any, by name.

    Raises UnsupportedModel for another architecture or an unknown key, and WeightsError for wrong values.
    """
    architecture = architecture_of(metadata, header.path.name)
    arch = metadata.text("general.architecture")
    assert arch is not None
    config = {"model_type": architecture.model_type} | _sizes(header, metadata, arch, architecture)
    head_dim = _head_dim(metadata, arch, architecture)
    if architecture.has_head_dim:
        config["head_dim"] = head_dim
    config |= architecture.fields(Source(header, metadata, arch))
    config |= biased(header, architecture)[0]
    config["architectures"] = [CLASSES[config["model_type"]]]
    config["rope_parameters"] = rope_parameters(metadata, arch, config, factors)
    _refuse_unknown(metadata, arch, config)
    return config


def _sizes(
    header: GgufHeader, metadata: Metadata, arch: str, architecture: Architecture
) -> dict[str, Any]:
    def needed(name: str) -> int:
        return metadata.needed(f"{arch}.{name}")

    embedding = header.tensors.get(EMBEDDING)
    if embedding is None:
        raise WeightsError(f"tensor {EMBEDDING} is missing from {header.path.name}")
    key = f"{arch}.attention.{EPSILONS[architecture.epsilon]}"
    epsilon = metadata.number(key)
    if epsilon is None:
        raise WeightsError(f"{header.path.name} has no {key}")
    heads, layers = needed("attention.head_count"), needed("block_count")
    if layers > len(header.tensors):
        # Lists of layers would take memory.
        raise WeightsError(
            f"{header.path.name} announces {layers} layers, and has {len(header.tensors)} tensors"
        )
    context = needed("context_length")
    if context > LONGEST_CONTEXT:
        raise WeightsError(
            f"{header.path.name}: {arch}.context_length={context}; at most {LONGEST_CONTEXT} is allowed"
        )
    inner = "feed_forward_length"
    if (
        f"{arch}.{inner}" not in metadata
        and f"{arch}.expert_count" in metadata
        and architecture.is_hybrid
    ):
        # All layers have experts.
        inner = f"expert_{inner}"
    return {
        "vocab_size": metadata.count(f"{arch}.vocab_size") or embedding.shape[0],
        "hidden_size": needed("embedding_length"),
        "intermediate_size": needed(inner),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count(f"{arch}.attention.head_count_kv") or heads,
        "max_position_embeddings": context,
        architecture.epsilon: epsilon,
        "hidden_act": "silu",
        "tie_word_embeddings": HEAD not in header.tensors,
        "dtype": _dtype(header),
    }


def _head_dim(metadata: Metadata, arch: str, architecture: Architecture) -> int:
    """The width of a head, which several keys repeat."""
    hidden = metadata.needed(f"{arch}.embedding_length")
    heads = metadata.needed(f"{arch}.attention.head_count")
    plain = hidden // heads
    head_dim = metadata.count(f"{arch}.attention.key_length") or plain
    repeated = ("attention.value_length", "rope.dimension_count")
    widths = [metadata.count(f"{arch}.{name}") or head_dim for name in repeated]
    is_partial = architecture.may_be_partial and 0 < widths[1] < head_dim and widths[1] % 2 == 0
    if (
        widths[0] != head_dim
        or (widths[1] != head_dim and not is_partial)
        or (head_dim != plain and not architecture.has_head_dim)
    ):
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


def _refuse_unknown(metadata: Metadata, arch: str, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for the first key of the architecture that is neither understood nor without effect."""
    for name, neutral in NEUTRAL.items():
        key = f"{arch}.{name}"
        if name.startswith("expert") and "num_experts_per_tok" in config:
            continue
        if metadata.count(key) not in (None, neutral):
            raise UnsupportedModel(f"{metadata.describe(key)} is not supported for {arch}")
    if metadata.flag(f"{arch}.attention.causal") is False:
        raise UnsupportedModel(f"{arch}.attention.causal=False is not supported for {arch}")
    without_effect = {f"{arch}.{name}" for name in WITHOUT_EFFECT}
    for key in metadata.unread(f"{arch}."):
        if key not in without_effect:
            raise UnsupportedModel(f"{metadata.describe(key)} is not supported for {arch}")
