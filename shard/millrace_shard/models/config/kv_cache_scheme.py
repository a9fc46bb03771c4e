"""How a checkpoint says that its KV cache is quantised: `kv_cache_scheme` of compressed-tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from millrace_shard.errors import UnsupportedModel

SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
"""The only supported scheme: fp8_e4m3fn with scales from the checkpoint. Absent fields have these values."""


def kv_cache_scheme(raw: Mapping[str, Any]) -> object:
    """The scheme in the object of a config.json, as it is; None if there is none."""
    quantization = raw.get("quantization_config") or raw.get("compression_config")
    return quantization.get("kv_cache_scheme") if isinstance(quantization, dict) else None


def cache_dtype_of(scheme: object) -> torch.dtype | None:
    """The dtype of the KV cache that a scheme means; None without one. Raises UnsupportedModel for other schemes."""
    if scheme is None:
        return None
    found = scheme if isinstance(scheme, dict) else {}
    wrong = {
        name: found.get(name) for name, value in SCHEME.items() if found.get(name, value) != value
    }
    if wrong or not isinstance(scheme, dict):
        raise UnsupportedModel(
            f"kv_cache_scheme={scheme!r} is not supported, only {SCHEME}; "
            "--kv-cache-dtype fp8_e4m3fn, fp8_e5m2 or int8 is used in its place"
        )
    return torch.float8_e4m3fn
