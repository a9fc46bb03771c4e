"""The choice of kernels for a device."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from millrace_shard.device.failures import is_out_of_memory
from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.agreement import TOLERANCE, largest_difference
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.build import (
    BuildError,
    disable_operators,
    load_operators,
    use_triton_cache,
)
from millrace_shard.kernels.cpu.operators import DTYPES, HEAD_DIM_STEP, CpuKernels
from millrace_shard.kernels.cuda.served_agreement import differing_bits, served_difference
from millrace_shard.kernels.kv_cache import cache_dtype_name
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.lora.lora_agreement import adapter_difference
from millrace_shard.kernels.plain import PlainKernels

FLASH_PACKAGE = "flash_attn_interface"

logger = logging.getLogger(__name__)


class _UnfitError(Exception):
    """Kernels cannot be used here; the message names the reason."""


def choose_kernels(
    device: torch.device,
    dtype: torch.dtype,
    *,
    deterministic: bool,
    shapes: Sequence[LayerShape],
    custom: bool = True,
    adapters: bool = False,
    integer: bool = False,
) -> Kernels:
    """Compiled kernels, if they build, fit and agree with plain torch on this machine; plain torch if not `custom`.

    Where they cannot be used, plain torch runs on CPU, with a warning, and UnsupportedModel is raised on CUDA: there a
    server on plain torch is several times slower and has no CUDA graphs, which the operator has to choose. The first
    call on a machine compiles, which takes up to a minute. Out-of-memory errors are raised, since they do not mean that
    the kernels are wrong. With `adapters`, kernels must apply LoRA adapters as plain torch does, too. With `integer`,
    kernels on CPU multiply quantised weights with activations in int8.
    """
    if device.type == "cuda":
        _sum_in_float32()
    plain = PlainKernels(deterministic=deterministic)
    candidate = {"cpu": _cpu_kernels, "cuda": _cuda_kernels}.get(device.type)
    if not custom or candidate is None:
        return plain
    try:
        kernels = candidate(device, dtype, shapes, deterministic=deterministic)
        if adapters:
            _check_adapters(kernels, device, dtype, shapes)
        if integer and isinstance(kernels, CpuKernels):
            kernels.integer = True
    except _UnfitError as reason:
        if device.type == "cuda":
            raise UnsupportedModel(
                f"the CUDA kernels cannot be used: {reason}; "
                "--disable-custom-kernels runs the model on plain torch, several times slower"
            ) from reason
        logger.warning("running on plain torch, slower than compiled kernels: %s", reason)
        return plain
    return kernels


def _sum_in_float32() -> None:
    """Keep the vendor's library from adding the parts of a product in 16 bits."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def _cpu_kernels(
    device: torch.device, dtype: torch.dtype, shapes: Sequence[LayerShape], *, deterministic: bool
) -> Kernels:
    """The compiled kernels for CPU. Raises _UnfitError."""
    if dtype not in DTYPES:
        raise _UnfitError(f"they have no {dtype} on CPU; --dtype bfloat16 runs on them")
    small = {LayerShape.small(shape.head_dim, shape.cache_dtype) for shape in shapes}
    if odd := [shape.head_dim for shape in small if shape.head_dim % HEAD_DIM_STEP]:
        raise _UnfitError(f"they take head_dim in multiples of {HEAD_DIM_STEP}, not {odd}")
    try:
        load_operators()
        kernels = CpuKernels(deterministic=deterministic)
        for shape in small:
            _check_small_shape(kernels, device, dtype, shape)
    except BuildError as error:
        raise _UnfitError(str(error)) from error
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        disable_operators()
        raise _UnfitError(f"they fail on this CPU: {error}") from error
    except _UnfitError:
        disable_operators()
        raise
    return kernels


def _cuda_kernels(
    device: torch.device, dtype: torch.dtype, shapes: Sequence[LayerShape], *, deterministic: bool
) -> Kernels:
    """The kernels for CUDA, with FlashAttention-3 if it is installed and agrees. Raises _UnfitError."""
    try:
        use_triton_cache()
        # Only torch's builds for CUDA include Triton.
        from millrace_shard.kernels.cuda import flash, operators  # noqa: PLC0415
    except BuildError as error:
        raise _UnfitError(str(error)) from error
    except ImportError as error:
        raise _UnfitError(f"they need Triton: {error}") from error
    if dtype not in operators.DTYPES:
        raise _UnfitError(f"they have no {dtype}")
    coded = {shape.cache_dtype or dtype for shape in shapes} - {dtype}
    if coded:
        raise _UnfitError(f"they have no KV cache in {', '.join(map(cache_dtype_name, coded))} yet")
    head_dims = {shape.head_dim for shape in shapes}
    if odd := [size for size in head_dims if size not in operators.HEAD_DIMS]:
        raise _UnfitError(
            f"they take head_dim from {operators.HEAD_DIMS[0]} to {operators.HEAD_DIMS[-1]}, not {odd}"
        )
    if not deterministic and dtype in flash.DTYPES:
        flash_kernels = _flash_kernels(device, dtype, shapes)
        if flash_kernels is not None:
            return flash_kernels
    kernels = operators.CudaKernels(deterministic=deterministic)
    try:
        _check_served_shapes(kernels, device, dtype, shapes)
    except operators.FAILURES as error:
        if is_out_of_memory(error):
            raise
        raise _UnfitError(f"they fail on this GPU: {error}") from error
    return kernels


def _flash_kernels(
    device: torch.device, dtype: torch.dtype, shapes: Sequence[LayerShape]
) -> Kernels | None:
    """Kernels with FlashAttention-3; None if it is not installed, and, with a warning, if it fails or disagrees."""
    from millrace_shard.kernels.cuda import flash, operators  # noqa: PLC0415

    try:
        kernels = flash.FlashKernels()
        _check_served_shapes(kernels, device, dtype, shapes)
    except (_UnfitError, ImportError, AttributeError, TypeError, *operators.FAILURES) as error:
        if is_out_of_memory(error):
            raise
        # If the package exists but lacks a dependency, a warning is logged.
        if not (isinstance(error, ModuleNotFoundError) and error.name == FLASH_PACKAGE):
            logger.warning("attention by Triton's kernels instead of flash-attn: %s", error)
        return None
    return kernels


def _check_small_shape(
    kernels: Kernels, device: torch.device, dtype: torch.dtype, shape: LayerShape
) -> None:
    """Raise _UnfitError if `kernels` differ from plain torch. Errors of the kernels propagate."""
    oracle = PlainKernels(deterministic=False)
    difference = largest_difference(kernels, oracle, dtype=dtype, shape=shape, device=device)
    if difference > TOLERANCE[dtype]:
        raise _UnfitError(f"they differ by {difference:.2g} here with head_dim {shape.head_dim}")


def _check_adapters(
    kernels: Kernels, device: torch.device, dtype: torch.dtype, shapes: Sequence[LayerShape]
) -> None:
    """Raise _UnfitError if `kernels` apply adapters otherwise than plain torch, or change rows without one."""
    oracle = PlainKernels(deterministic=False)
    for size in {shape.head_dim for shape in shapes}:
        try:
            difference = adapter_difference(
                kernels, oracle, dtype=dtype, head_dim=size, device=device
            )
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise _UnfitError(f"they fail with adapters: {error}") from error
        if difference > TOLERANCE[dtype]:
            if device.type == "cpu":
                disable_operators()
            raise _UnfitError(f"with adapters they differ by {difference:.2g} here")


def _check_served_shapes(
    kernels: Kernels, device: torch.device, dtype: torch.dtype, shapes: Sequence[LayerShape]
) -> None:
    """Raise _UnfitError if `kernels` differ from plain torch, or break the promise of deterministic mode."""
    oracle = PlainKernels(deterministic=False)
    for shape in dict.fromkeys(shapes):
        difference = served_difference(kernels, oracle, dtype=dtype, shape=shape, device=device)
        if difference > TOLERANCE[dtype]:
            raise _UnfitError(f"they differ by {difference:.2g} here with {shape}")
        if not kernels.deterministic:
            continue
        operator = differing_bits(kernels, dtype=dtype, shape=shape, device=device)
        if operator is not None:
            raise _UnfitError(f"the bits of a row depend on the rest of the step: {operator}")
