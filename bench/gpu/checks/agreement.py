"""The Triton kernels against plain torch, for each dtype, mode and head size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.gpu.engine.kernels import cuda_kernels
from bench.gpu.figures import check
from bench.gpu.setting import Emit, Setting
from millrace_shard.kernels.agreement import TOLERANCE, largest_difference
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.plain import PlainKernels

MODES = {"fast": False, "deterministic": True}
SECONDS = 3.0
"""Time for one head size, with the compilation of its kernels."""


def run(setting: Setting, emit: Emit) -> None:
    """Emit the largest difference of each dtype and mode over the head sizes so far."""
    oracle = PlainKernels(deterministic=False)
    for dtype in setting.scale.checked_dtypes:
        for mode, deterministic in MODES.items():
            kernels = cuda_kernels(deterministic=deterministic)
            differences: dict[int, float] = {}
            for head_dim in setting.scale.checked_head_dims:
                if differences and not setting.has_time_for(SECONDS):
                    break
                differences[head_dim] = _difference(
                    kernels, oracle, dtype, head_dim, setting.device
                )
                emit(
                    check(
                        f"agreement with plain torch, {name_of(dtype)}, {mode}",
                        max(differences.values()),
                        "relative difference",
                        {f"head size {size}": found for size, found in differences.items()},
                        most=TOLERANCE[dtype],
                    )
                )


def cases(setting: Setting) -> Iterator[Callable[[], object]]:
    """A call for each dtype, mode and head size, in the order of `run`."""
    oracle = PlainKernels(deterministic=False)
    for dtype in setting.scale.checked_dtypes:
        for deterministic in MODES.values():
            kernels = cuda_kernels(deterministic=deterministic)
            for head_dim in setting.scale.checked_head_dims:
                yield partial(_difference, kernels, oracle, dtype, head_dim, setting.device)


@torch.inference_mode()
def _difference(
    kernels: Kernels, oracle: Kernels, dtype: torch.dtype, head_dim: int, device: torch.device
) -> float:
    shape = LayerShape.small(head_dim)
    return largest_difference(kernels, oracle, dtype=dtype, shape=shape, device=device)


def name_of(dtype: torch.dtype) -> str:
    """The name of `dtype` without torch's prefix."""
    return str(dtype).removeprefix("torch.")
