"""The scales of a KV cache in fp8: one of keys and one of values for each layer, from the checkpoint."""

from __future__ import annotations

import math
from typing import Protocol

from torch import Tensor

from millrace_shard.errors import WeightsError

KEY_NAMES = ("k_scale", "k_proj.k_scale", "attn.k_scale", "k_proj.output_scale")
VALUE_NAMES = ("v_scale", "v_proj.v_scale", "attn.v_scale", "v_proj.output_scale")
"""Names below the attention: of compressed-tensors and TGI, of ModelOpt, of vLLM, and of older compressed-tensors."""
SHARED_NAMES = ("kv_scale", "attn.kv_scale")
"""Names of one scale for both, in older checkpoints."""


class ScaleReader(Protocol):
    """Reads single values of a checkpoint."""

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of this name."""

    def whole(self, name: str) -> Tensor:
        """The tensor in the dtype of the file."""


def read_kv_scales(weights: ScaleReader, attention: str) -> tuple[float, float]:
    """Scales of keys and values of the module `attention`; 1 if the checkpoint has none.

    Raises WeightsError for a scale that is not a positive finite number, and if only one of the two is there.
    """
    key, value = (
        _first(weights, attention, names + SHARED_NAMES) for names in (KEY_NAMES, VALUE_NAMES)
    )
    if key is None and value is None:
        return 1.0, 1.0
    if key is None or value is None:
        raise WeightsError(
            f"{attention} has a scale for {'keys' if value is None else 'values'} only"
        )
    return _scale(weights, key), _scale(weights, value)


def _first(weights: ScaleReader, attention: str, names: tuple[str, ...]) -> str | None:
    whole = (f"{attention}.{name}" for name in names)
    return next((name for name in whole if name in weights), None)


def _scale(weights: ScaleReader, name: str) -> float:
    tensor = weights.whole(name)
    if tensor.numel() != 1:
        raise WeightsError(
            f"tensor {name} has shape {list(tensor.shape)}; one scale per tensor is supported"
        )
    scale = float(tensor.float())
    if not (math.isfinite(scale) and scale > 0):
        raise WeightsError(f"tensor {name} is {scale}; a scale must be a positive finite number")
    return scale
