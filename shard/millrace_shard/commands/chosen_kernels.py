"""Chooses the kernels for the flags."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from millrace_shard.commands.device_settings import choose_cache_dtype, is_deterministic
from millrace_shard.config import ShardConfig
from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.choose import choose_kernels
from millrace_shard.kernels.cpu.int8_linear import is_fast, with_int8
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.quantized import CodeFormat
from millrace_shard.models.description import ModelDescription
from millrace_shard.models.load import check_model
from millrace_shard.models.quantized import code_formats
from millrace_shard.speculation.checkpoints import is_medusa
from millrace_shard.weights.quantized.quantization_config import is_quantized

logger = logging.getLogger(__name__)


def chosen_kernels(config: ShardConfig, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The kernels for the model and the draft model, whose folders are local. Raises UnsupportedModel."""
    kernels = choose_kernels(
        device,
        dtype,
        deterministic=is_deterministic(config, device),
        shapes=_layer_shapes(config, device, choose_cache_dtype(config, device, dtype)),
        custom=not config.disable_custom_kernels,
        adapters=config.enable_lora,
        integer=config.quantize_activations != "exact",
    )
    if config.quantize == "int8":
        return _int8(kernels, config, device, dtype)
    if config.quantize_activations != "exact":
        _tell_of_activations(kernels, config, dtype)
    return kernels


def _tell_of_activations(kernels: Kernels, config: ShardConfig, dtype: torch.dtype) -> None:
    is_asked = config.quantize_activations == "int8"
    if not isinstance(kernels, CpuKernels) or dtype != torch.bfloat16:
        if is_asked:
            logger.warning(
                "--quantize-activations int8 has no effect: it needs compiled kernels on CPU and bfloat16"
            )
    elif is_asked or config.quantize is not None or is_quantized(config.model_folder):
        logger.info(
            "activations are rounded to int8 where the weights are quantised to integers;"
            " --quantize-activations exact keeps them"
        )


def _int8(
    kernels: Kernels, config: ShardConfig, device: torch.device, dtype: torch.dtype
) -> Kernels:
    if device.type != "cpu" or dtype != torch.bfloat16:
        raise UnsupportedModel(f"--quantize int8 is for bfloat16 on CPU, not {dtype} on {device}")
    integer = config.quantize_activations != "exact"
    activations = "are too" if integer else "keep the model's dtype"
    logger.info(
        "weights of all linears but the output head are int8, and activations %s", activations
    )
    if not is_fast():
        logger.warning(
            "int8 is slower than bfloat16 here: its operator needs x86 with AVX2, and a compiler"
        )
    return with_int8(kernels, integer=integer)


def _layer_shapes(
    config: ShardConfig, device: torch.device, cache_dtype: torch.dtype
) -> tuple[LayerShape, ...]:
    """The shapes of the model and of the draft model, which share the kernels."""
    folders = [(config.model_folder, config.quantize)]
    if config.draft_model is not None and not is_medusa(Path(config.draft_model)):
        folders.append((Path(config.draft_model), None))
    shapes = list[LayerShape]()
    for folder, quantize in folders:
        model = ModelDescription.read(folder)
        check_model(model, allow_unlisted=config.allow_unlisted_model)
        shape = model.layer_shape(config.world_size)
        formats: tuple[CodeFormat, ...] = ()
        # Kernels on CPU are compiled for all formats, and compare each when they first pack it.
        if device.type == "cuda" and model.spec is not None:
            formats = code_formats(
                folder,
                model.spec,
                quantize=quantize,
                rank=config.rank,
                world_size=config.world_size,
            )
        shapes.append(replace(shape, cache_dtype=cache_dtype, formats=formats))
    return tuple(shapes)
