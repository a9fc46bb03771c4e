"""Names of tensors in transformers' classes and in GGUF files, and the shapes that a config requires."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from millrace_shard.errors import UnsupportedModel, WeightsError
from millrace_shard.weights.gguf.header import GgufHeader

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
OUTSIDE = {
    "model.embed_tokens.weight": EMBEDDING,
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": HEAD,
}
INSIDE = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ROTATED = ("attn_q", "attn_k")
"""Projections whose rows files of the llama architecture hold in another order."""


def stored_name(name: str) -> str | None:
    """The name in the file of the tensor that transformers calls `name`; None if there is none."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    match = LAYER.fullmatch(name)
    if match is None or match[2] not in INSIDE:
        return None
    return f"blk.{match[1]}.{INSIDE[match[2]]}.{match[3]}"


def is_rotated(stored: str) -> bool:
    """Whether files of the llama architecture permute the rows of the tensor `stored`."""
    return stored.startswith("blk.") and stored.split(".")[2] in ROTATED


def check_tensors(header: GgufHeader, config: Mapping[str, Any]) -> None:
    """Raise unless the file has exactly the tensors of a model with this config, in the right shapes.

    A tensor that the decoder does not know would change the model if it were left out: UnsupportedModel.
    """
    layers = config["num_hidden_layers"]
    if layers > len(header.tensors):
        raise WeightsError(
            f"{header.path.name} announces {layers} layers, and has {len(header.tensors)} tensors: "
            f"tensor blk.{layers - 1}.attn_norm.weight is missing"
        )
    expected = _shapes(config)
    for name, shape in expected.items():
        tensor = header.tensors.get(name)
        if tensor is None:
            raise WeightsError(f"tensor {name} is missing from {header.path.name}")
        if tensor.shape != shape:
            raise WeightsError(
                f"tensor {name} in {header.path.name} has shape {list(tensor.shape)},"
                f" its metadata says {list(shape)}"
            )
    extra = sorted(header.tensors.keys() - expected.keys() - {ROPE_FACTORS})
    if extra:
        raise UnsupportedModel(
            f"{header.path.name} has tensor {extra[0]}, which is not supported for {config['model_type']}"
        )


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (vocabulary, hidden),
        "output_norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes[HEAD] = (vocabulary, hidden)
    layer = _layer_shapes(config)
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"blk.{number}.{name}": shape for name, shape in layer.items()}
    return shapes


def _layer_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    attention = {
        "attn_q": (heads * head_dim, hidden),
        "attn_k": (kv_heads * head_dim, hidden),
        "attn_v": (kv_heads * head_dim, hidden),
        "attn_output": (hidden, heads * head_dim),
    }
    mlp = {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    norms = {"attn_norm": hidden, "ffn_norm": hidden}
    biased = ["attn_q", "attn_k", "attn_v"] if config["model_type"] == "qwen2" else []
    if config["model_type"] == "qwen3":
        norms |= {"attn_q_norm": head_dim, "attn_k_norm": head_dim}
    if config.get("attention_bias"):
        biased += attention
    if config.get("mlp_bias"):
        biased += mlp
    weights = attention | mlp
    return {
        **{f"{name}.weight": shape for name, shape in weights.items()},
        **{f"{name}.weight": (size,) for name, size in norms.items()},
        **{f"{name}.bias": weights[name][:1] for name in biased},
    }
