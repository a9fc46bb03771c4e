"""Which kernels a shard runs on."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from millrace_shard.kernels.agreement import TOLERANCE, largest_difference
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.build import BuildError, load_operators
from millrace_shard.kernels.cpu import DTYPES, HEAD_DIM_STEP, CpuKernels
from millrace_shard.kernels.plain import PlainKernels

logger = logging.getLogger(__name__)


def choose_kernels(
    device: torch.device,
    dtype: torch.dtype,
    *,
    deterministic: bool,
    head_dims: Sequence[int],
    custom: bool = True,
) -> Kernels:
    """Compiled kernels when they build, fit and agree with plain torch on this machine, else plain.

    The first call on a machine compiles, which takes seconds.
    """
    plain = PlainKernels(deterministic=deterministic)
    if not custom or device.type != "cpu":
        return plain
    compiled = CpuKernels(deterministic=deterministic)
    reason = _refusal(compiled, dtype, head_dims)
    if reason is not None:
        logger.warning("running on plain torch, slower than compiled kernels: %s", reason)
        return plain
    return compiled


def _refusal(kernels: Kernels, dtype: torch.dtype, head_dims: Sequence[int]) -> str | None:
    """Why the CPU kernels cannot be used, or None."""
    if dtype not in DTYPES:
        return f"they have no {dtype}"
    if odd := [size for size in head_dims if size % HEAD_DIM_STEP]:
        return f"they take head_dim in multiples of {HEAD_DIM_STEP}, not {odd}"
    try:
        load_operators()
    except BuildError as error:
        return str(error)
    for size in set(head_dims):
        try:
            difference = largest_difference(
                kernels, PlainKernels(deterministic=False), dtype=dtype, head_dim=size
            )
        except RuntimeError as error:
            return f"they fail on this CPU: {error}"
        if difference > TOLERANCE[dtype]:
            return f"they differ by {difference:.2g} on this CPU with head_dim {size}"
    return None
