"""The choice of kernels for a device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from millrace_shard.device.failures import is_out_of_memory, kernel_failures
from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.agreement import TOLERANCE, largest_difference
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.build import (
    BuildError,
    disable_operators,
    load_operators,
    missing_for_triton,
    use_triton_cache,
)
from millrace_shard.kernels.cpu.operators import DTYPES, HEAD_DIM_STEP, CpuKernels
from millrace_shard.kernels.cuda.served_agreement import (
    differing_bits,
    prompt_difference,
    served_difference,
)
from millrace_shard.kernels.kept_results import kept_results
from millrace_shard.kernels.kv_cache import is_coded
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.lora.lora_agreement import adapter_difference
from millrace_shard.kernels.plain import PlainKernels

FLASH_PACKAGE = "flash_attn_interface"

HALF_DTYPES = (torch.bfloat16, torch.float16)

logger = logging.getLogger(__name__)


class _UnfitError(Exception):
    """Kernels cannot be used here; the message names the reason."""


LIBRARY_FAILURES: tuple[type[Exception], ...] = (
    *(_UnfitError, ImportError, AttributeError, TypeError, ValueError),
)
"""What an operator of a library raises that is missing, or that has other parameters."""


def choose_kernels(
    device: torch.device,
    dtype: torch.dtype,
    *,
    deterministic: bool,
    shapes: Sequence[LayerShape],
    custom: bool = True,
    adapters: bool = False,
    disabled: Collection[str] = (),
) -> Kernels:
    """Compiled kernels, if they build, fit and agree with plain torch on this machine; plain torch if not `custom`.

    Where they cannot be used, plain torch runs on CPU, with a warning, and UnsupportedModel is raised on CUDA: there a
    server on plain torch is several times slower and has no CUDA graphs, which the operator has to choose. The first
    call on a machine compiles, which takes up to a minute. Out-of-memory errors are raised, since they do not mean that
    the kernels are wrong. With `adapters`, kernels must apply LoRA adapters as plain torch does, too. Operators of
    libraries that are `disabled` are not used.
    """
    if device.type == "cuda":
        _sum_in_float32()
    plain = PlainKernels(deterministic=deterministic)
    candidates: dict[str, Callable[..., Kernels]] = {
        "cpu": _cpu_kernels,
        "cuda": partial(_cuda_kernels, disabled=disabled),
    }
    candidate = candidates.get(device.type)
    if not custom or candidate is None:
        return plain
    try:
        kernels = candidate(device, dtype, shapes, deterministic=deterministic)
        if adapters:
            _check_adapters(kernels, device, dtype, shapes)
    except _UnfitError as reason:
        if device.type == "cuda":
            raise UnsupportedModel(
                f"the CUDA kernels cannot be used: {reason}; "
                "--disable-custom-kernels runs the model on plain torch, several times slower"
            ) from reason
        logger.warning("running on plain torch, slower than compiled kernels: %s", reason)
        return plain
    return kernels


def sum_of_ranks(device: torch.device) -> Callable[[Tensor], Tensor] | None:
    """The kernel that adds the parts of several ranks in order; None where plain torch does."""
    if device.type != "cuda":
        return None
    try:
        use_triton_cache()
        from millrace_shard.kernels.cuda.triton_linear import sum_ranks  # noqa: PLC0415
    except (BuildError, ImportError):
        # The kernels of the model report it.
        return None
    return sum_ranks


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
    small = {
        # Experts take three quarters of the check.
        LayerShape.small(
            shape.head_dim,
            shape.cache_dtype,
            has_experts=bool(shape.experts),
            latent_dim=shape.latent_dim,
        )
        for shape in shapes
    }
    widths = [width for shape in small for width in (shape.head_dim, shape.latent_dim or 0)]
    if odd := [width for width in widths if width % HEAD_DIM_STEP]:
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
    device: torch.device,
    dtype: torch.dtype,
    shapes: Sequence[LayerShape],
    *,
    deterministic: bool,
    disabled: Collection[str],
) -> Kernels:
    """The kernels for CUDA, in fast mode with those operators of libraries that agree. Raises _UnfitError."""
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
    _check_cuda_shapes(shapes)
    chosen = () if deterministic else _torch_operators(device, dtype, shapes, disabled)
    # FlashAttention-3 reads fp8 only where queries are fp8, too.
    is_flash = (
        dtype in flash.DTYPES and _has_plain_caches(shapes, dtype) and flash.FLASH not in disabled
    )
    if not deterministic and is_flash:
        flash_kernels = _flash_kernels(device, dtype, shapes, chosen)
        if flash_kernels is not None:
            return flash_kernels
    kernels = operators.CudaKernels(deterministic=deterministic, operators=chosen)
    try:
        _check_served_shapes(kernels, device, dtype, shapes)
    except kernel_failures() as error:
        if is_out_of_memory(error):
            raise
        missing = missing_for_triton()
        reason = f"they fail on this GPU: {error}" + (f"; {missing}" if missing else "")
        raise _UnfitError(reason) from error
    return kernels


def _check_cuda_shapes(shapes: Sequence[LayerShape]) -> None:
    """Raise _UnfitError for widths that the CUDA kernels do not have."""
    from millrace_shard.kernels.cuda.operators import (  # noqa: PLC0415
        HEAD_DIMS,
        LATENT_DIMS,
        ROPE_DIMS,
        has_widths,
    )

    for shape in shapes:
        head_dim, latent_dim = shape.head_dim, shape.latent_dim
        if has_widths(head_dim, latent_dim):
            continue
        if latent_dim is None:
            widths = f"head_dim from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}, not {head_dim}"
        else:
            widths = f"latents of {LATENT_DIMS[0]} to {LATENT_DIMS[-1]} channels and rotated keys "
            widths += f"of up to {ROPE_DIMS[-1]}, not {latent_dim} and {head_dim - latent_dim}"
        raise _UnfitError(f"they take {widths}")


def _has_plain_caches(shapes: Sequence[LayerShape], dtype: torch.dtype) -> bool:
    """Whether caches have keys and values, and of the dtype of the model."""
    return not any(
        is_coded(shape.cache_dtype or dtype) or shape.latent_dim is not None for shape in shapes
    )


def _torch_operators(
    device: torch.device,
    dtype: torch.dtype,
    shapes: Sequence[LayerShape],
    disabled: Collection[str],
) -> tuple[str, ...]:
    """Operators that the model has a use for, and that agree with plain torch on its shapes.

    A warning names those that fail or disagree.
    """
    from millrace_shard.kernels.cuda.operators import (  # noqa: PLC0415
        CUBLAS,
        GROUPED,
        SCALED,
        VARLEN,
        CudaKernels,
    )
    from millrace_shard.kernels.cuda.scaled_products import multiplies  # noqa: PLC0415

    useful = {
        VARLEN: dtype in HALF_DTYPES and _has_plain_caches(shapes, dtype),
        GROUPED: dtype == torch.bfloat16 and any(shape.experts for shape in shapes),
        CUBLAS: any(shape.formats for shape in shapes),
        SCALED: dtype == torch.bfloat16
        and any(multiplies(each, device) for shape in shapes for each in shape.formats),
    }
    chosen = []
    for name in (name for name, is_useful in useful.items() if is_useful and name not in disabled):
        try:
            kernels = CudaKernels(deterministic=False, operators=[name])
            _check_operators(kernels, device, dtype, shapes)
        except (*LIBRARY_FAILURES, *kernel_failures()) as error:
            if is_out_of_memory(error):
                raise
            logger.warning("%s is not used: %s", name, error)
        else:
            chosen.append(name)
    return tuple(chosen)


def _check_operators(
    kernels: Kernels, device: torch.device, dtype: torch.dtype, shapes: Sequence[LayerShape]
) -> None:
    """Raise _UnfitError if steps with many rows, for which the operators are, differ from plain torch."""
    oracle = PlainKernels(deterministic=False)
    for shape in dict.fromkeys(shapes):
        difference = prompt_difference(kernels, oracle, dtype=dtype, shape=shape, device=device)
        if difference > TOLERANCE[dtype]:
            raise _UnfitError(f"it differs by {difference:.2g} here with {shape}")


def _flash_kernels(
    device: torch.device,
    dtype: torch.dtype,
    shapes: Sequence[LayerShape],
    chosen: Collection[str],
) -> Kernels | None:
    """Kernels with FlashAttention-3; None if it is not installed, and, with a warning, if it fails or disagrees."""
    from millrace_shard.kernels.cuda import flash  # noqa: PLC0415
    from millrace_shard.kernels.cuda.operators import VARLEN  # noqa: PLC0415

    # Torch's attention would compute none of its prompts.
    others = [name for name in chosen if name != VARLEN]
    try:
        kernels = flash.FlashKernels(others)
        _check_served_shapes(kernels, device, dtype, shapes)
    except (*LIBRARY_FAILURES, *kernel_failures()) as error:
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

    def agrees() -> bool:
        difference = largest_difference(kernels, oracle, dtype=dtype, shape=shape, device=device)
        if difference > TOLERANCE[dtype]:
            raise _UnfitError(
                f"they differ by {difference:.2g} here with head_dim {shape.head_dim}"
            )
        return True

    kept_results().passed(f"{kernels.name} {kernels.deterministic} {dtype} {shape}", agrees)


def _check_adapters(
    kernels: Kernels, device: torch.device, dtype: torch.dtype, shapes: Sequence[LayerShape]
) -> None:
    """Raise _UnfitError if `kernels` apply adapters otherwise than plain torch, or change rows without one."""
    # Adapters of latents change linears only, whatever the width of the heads.
    for size in {64 if shape.latent_dim else shape.head_dim for shape in shapes}:
        check = partial(_check_adapted_size, kernels, device, dtype, size)
        if device.type == "cpu":
            name = f"adapters {kernels.name} {kernels.deterministic} {dtype} {size}"
            kept_results().passed(name, check)
        else:
            check()


def _check_adapted_size(
    kernels: Kernels, device: torch.device, dtype: torch.dtype, head_dim: int
) -> bool:
    oracle = PlainKernels(deterministic=False)
    try:
        difference = adapter_difference(
            kernels, oracle, dtype=dtype, head_dim=head_dim, device=device
        )
    except kernel_failures() as error:
        if is_out_of_memory(error):
            raise
        raise _UnfitError(f"they fail with adapters: {error}") from error
    if difference > TOLERANCE[dtype]:
        if device.type == "cpu":
            disable_operators()
        raise _UnfitError(f"with adapters they differ by {difference:.2g} here")
    return True


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
