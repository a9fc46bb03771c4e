"""Device, dtype and modes that follow from the config of a shard."""

from __future__ import annotations

import logging

import torch

from millrace_shard.config import ShardConfig
from millrace_shard.errors import ModelError
from millrace_shard.kernels.kv_cache import CACHE_DTYPES
from millrace_shard.model_runner.graph_capture import (
    CudaCapture,
    GraphSettings,
    ends_failed_captures,
)
from millrace_shard.models.description import ModelDescription

FLOAT16_OVERFLOWS = ("gemma2", "glm4")
"""Model types whose activations exceed the range of float16."""

logger = logging.getLogger(__name__)


def choose_device(config: ShardConfig) -> torch.device:
    """The configured device; `auto` means CUDA if available. Ranks of a host use its GPUs in order.

    Raises ModelError if CUDA is configured but not available.
    """
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ModelError("--device cuda, but no CUDA device is found")
    return torch.device("cuda", config.rank % torch.cuda.device_count())


def choose_dtype(config: ShardConfig, device: torch.device) -> torch.dtype:
    """The configured dtype, else the checkpoint's; on CPU, bfloat16 replaces the checkpoint's float16.

    Logs a warning for float16 if the activations of the model exceed its range.
    """
    dtype = _dtype(config, device)
    if dtype == torch.float16:
        model_type = ModelDescription.read(config.model_folder).model_type
        if model_type in FLOAT16_OVERFLOWS:
            logger.warning(
                "activations of %s exceed the range of float16: expect wrong tokens, and requests that fail; "
                "--dtype bfloat16 has the range",
                model_type,
            )
    return dtype


def choose_cache_dtype(
    config: ShardConfig, device: torch.device, dtype: torch.dtype
) -> torch.dtype:
    """The configured dtype of the KV cache, else the dtype of the checkpoint's scheme, else `dtype`, the model's.

    Raises UnsupportedModel for a scheme that is not supported.
    """
    if config.kv_cache_dtype != "auto":
        return CACHE_DTYPES[config.kv_cache_dtype]
    if device.type != "cpu":
        # The CUDA kernels have no codes yet, and the model's own type is exact.
        return dtype
    return ModelDescription.read(config.model_folder).cache_dtype() or dtype


def _dtype(config: ShardConfig, device: torch.device) -> torch.dtype:
    if config.dtype is not None:
        return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[
            config.dtype
        ]
    dtype = ModelDescription.read(config.model_folder).dtype
    if dtype not in (torch.float16, torch.bfloat16):
        return torch.float32
    return torch.bfloat16 if device.type == "cpu" else dtype


def graph_settings(config: ShardConfig, device: torch.device) -> GraphSettings | None:
    """The configured sizes of CUDA graphs; None for other devices. Logs a warning where torch is too old."""
    if device.type != "cuda" or config.cuda_graphs == ():
        return None
    if not ends_failed_captures(torch.__version__):
        logger.warning(
            "torch %s does not recover from a CUDA graph whose capture fails: the shard would keep all memory that "
            "torch caches. CUDA needs torch 2.13 or later, or --cuda-graphs 0",
            torch.__version__,
        )
    return GraphSettings(config.cuda_graphs, CudaCapture)


def is_deterministic(config: ShardConfig, device: torch.device) -> bool:
    """Whether deterministic mode is on; `auto` means on for CPU, where its cost is negligible."""
    return config.deterministic == "on" or (config.deterministic == "auto" and device.type == "cpu")
