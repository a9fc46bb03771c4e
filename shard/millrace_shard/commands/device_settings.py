"""Device, dtype and modes that follow from the config of a shard."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

import torch

from millrace_proto.gpus import shown_gpus
from millrace_shard.config import ShardConfig
from millrace_shard.device.gpus import LEAST_CAPABILITY, gpu_description, report
from millrace_shard.errors import ModelError, UnsupportedModel
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.kv_cache import CACHE_DTYPES
from millrace_shard.model_runner.graph_capture import (
    SIZES,
    CudaCaptures,
    GraphSettings,
    ends_failed_captures,
    launches_outlast,
)
from millrace_shard.models.description import ModelDescription
from millrace_shard.variables import GpuVariables
from millrace_shard.weights.quantized.quantization_config import is_quantized
from millrace_shard.weights.weights import checkpoint_bytes

FLOAT16_OVERFLOWS = ("gemma2", "glm4")
"""Model types whose activations exceed the range of float16."""
PLAIN = "--disable-custom-kernels"

logger = logging.getLogger(__name__)


def choose_device(config: ShardConfig) -> torch.device:
    """The configured device; `auto` means CUDA if it can be used. Ranks of a host use its GPUs in order.

    Logs a warning where `auto` means the CPU of a host with GPUs. Raises ModelError if CUDA is configured but cannot
    be used.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    gpus = report(plain=config.disable_custom_kernels)
    if gpus.names:
        return torch.device("cuda", config.rank % len(gpus.names))
    if config.device == "cuda":
        raise ModelError(f"--device cuda, but no GPU can be used: {gpus.problem}")
    if not GpuVariables().hides_gpus and (shown := shown_gpus()):
        logger.warning(
            "THE MODEL RUNS ON CPU, although this host has %s: %s. --device cpu is for a host where that is intended",
            ", ".join(shown),
            gpus.problem,
        )
    return torch.device("cpu")


def main(argv: Sequence[str] | None = None) -> int:
    """Print, as JSON, what the launcher asks before it chooses the number of shards: the GPUs that they can use."""
    parser = argparse.ArgumentParser("millrace-shard gpus", description=main.__doc__)
    parser.add_argument(
        PLAIN, action="store_true", help="count GPUs on which only plain PyTorch runs, too"
    )
    plain = parser.parse_args(argv).disable_custom_kernels
    sys.stdout.write(json.dumps(asdict(report(plain=plain))) + "\n")
    return 0


def machine(config: ShardConfig, device: torch.device, kernels: Kernels) -> str:
    """The device, the libraries, the kernels and the graphs that serve, for the log."""
    mode = "deterministic" if kernels.deterministic else "fast"
    how = f"kernels {kernels.name}, {mode}"
    if kernels.operators:
        how += f", with {', '.join(kernels.operators)}"
    if device.type != "cuda":
        threads = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
        return f"serving on CPU, {threads}; torch {torch.__version__}; {how}"
    try:
        triton = f"Triton {version('triton')}"
    except PackageNotFoundError:
        triton = "no Triton"
    sizes = config.cuda_graphs
    graphs = f"CUDA graphs for {', '.join(map(str, sizes))} rows" if sizes else "no CUDA graphs"
    if sizes is None:
        graphs = f"CUDA graphs for up to {SIZES[-1]} rows"
    return f"serving on {gpu_description(device)}; torch {torch.__version__}, {triton}; {how}; {graphs}"


def choose_dtype(config: ShardConfig, device: torch.device) -> torch.dtype:
    """The configured dtype, else the checkpoint's; on CPU, bfloat16 replaces the checkpoint's float16.

    Logs a warning for float16 if the activations of the model exceed its range. Raises UnsupportedModel for bfloat16 on
    a GPU without it.
    """
    dtype = _dtype(config, device)
    if dtype == torch.bfloat16 and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < LEAST_CAPABILITY:
            raise UnsupportedModel(
                f"GPUs of compute capability {'.'.join(map(str, capability))} have no bfloat16: give --dtype float16"
            )
    if dtype == torch.float16:
        model_type = ModelDescription.read(config.model_folder).model_type
        if model_type in FLOAT16_OVERFLOWS:
            logger.warning(
                "activations of %s exceed the range of float16: expect wrong tokens, and requests that fail; "
                "--dtype bfloat16 has the range",
                model_type,
            )
    return dtype


def choose_cache_dtype(config: ShardConfig, dtype: torch.dtype) -> torch.dtype:
    """The configured dtype of the KV cache, else the dtype of the checkpoint's scheme, else `dtype`, the model's.

    Raises UnsupportedModel for a scheme that is not supported.
    """
    if config.kv_cache_dtype != "auto":
        return CACHE_DTYPES[config.kv_cache_dtype]
    model = ModelDescription.read(config.model_folder)
    requested = model.cache_dtype() or dtype
    if requested != dtype and model.spec is not None and model.spec.has_latents:
        logger.info("kv_cache_scheme in config.json is not followed: latents keep the model's type")
        return dtype
    return requested


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
    return GraphSettings(config.cuda_graphs, CudaCaptures(), launches_outlast)


def is_deterministic(config: ShardConfig, device: torch.device) -> bool:
    """Whether deterministic mode is on; `auto` means on for CPU, where its cost is negligible."""
    return config.deterministic == "on" or (config.deterministic == "auto" and device.type == "cpu")


LARGEST_PART = 0.85
"""Of a GPU's memory that weights may take; the rest is for the KV cache and the largest step."""
QUANTIZED_BYTES = {"fp8": 1.05, "int4": 0.6}
"""Bytes of a parameter on CUDA by --quantize, scales included."""
MOST_SHARDS = 64


def too_large(config: ShardConfig, device: torch.device, dtype: torch.dtype) -> ModelError:
    """The error of a GPU whose memory the weights exceed: what they take, and which flags would let them fit."""
    folder, ranks = config.model_folder, config.world_size
    is_coded = config.quantize is not None or is_quantized(folder)
    parameters = None if is_coded else ModelDescription.read(folder).num_parameters()
    whole = checkpoint_bytes(folder) if parameters is None else parameters * dtype.itemsize
    free, total = torch.cuda.mem_get_info(device)
    most = total * LARGEST_PART
    ways = [
        f"--quantize {name} (about {_gib(parameters * size / ranks)})"
        for name, size in QUANTIZED_BYTES.items()
        if parameters is not None and parameters * size / ranks <= most
    ]
    shards = 2 * ranks
    while shards <= MOST_SHARDS and whole / shards > most:
        shards *= 2
    if shards <= MOST_SHARDS:
        ways.append(f"--num-shard {shards} (about {_gib(whole / shards)} on each GPU)")
    known = "" if parameters is None else f" in {str(dtype).removeprefix('torch.')}"
    fits = (
        f": these would fit: {', '.join(ways)}"
        if ways
        else ", and no flag makes it fit on such GPUs"
    )
    return ModelError(
        f"not enough memory to load the model: its weights take about {_gib(whole / ranks)}{known} on this rank, and"
        f" {torch.cuda.get_device_name(device)} has {_gib(total)}, of which {_gib(free)} are free now{fits}"
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
