"""The parameters of RoPE from the metadata of a GGUF file and its tensor of frequency factors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from millrace_shard.errors import UnsupportedModel, WeightsError
from millrace_shard.model_loader.gguf.metadata import Metadata
from millrace_shard.model_loader.gguf.tensor_names import ROPE_FACTORS

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
    """`rope_type` with its parameters."""
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
    """The parameters of kind llama3 from which `factors` follow."""
    if factors.shape != (head_dim // 2,):
        raise WeightsError(
            f"tensor {ROPE_FACTORS} has shape {list(factors.shape)}, and heads have {head_dim} channels"
        )
    factor = float(factors.max())
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    turns = LLAMA3["original_max_position_embeddings"] / (2 * math.pi * theta**exponents)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - kept) / factor + kept)
    if not torch.allclose(factors.double(), expected, rtol=TOLERANCE, atol=0):
        raise UnsupportedModel(
            f"tensor {ROPE_FACTORS} holds factors that are not those of Llama 3.1 and its successors"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}
