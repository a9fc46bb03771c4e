"""The Triton kernels against plain torch: each dtype, mode and head size, and what else served models compute."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.gpu.engine.kernels import cuda_kernels
from bench.gpu.figures import check, unchecked
from bench.gpu.setting import Emit, Setting
from millrace_shard.kernels.agreement import TOLERANCE, largest_difference
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.plain import PlainKernels

MODES = {"fast": False, "deterministic": True}
PLAIN = PlainKernels(deterministic=False)
SECONDS = 3.0
"""Time for one case, with the compilation of its kernels."""
Members = Iterator[tuple[str, Callable[[], float]]]
"""Names of cases, and what computes their differences."""


def run(setting: Setting, emit: Emit) -> None:
    """Emit the largest difference of each group of cases so far; at least one case of the first group is run."""
    for number, (group, dtype, members) in enumerate(_groups(setting, PLAIN)):
        figure, differences = f"agreement with plain torch, {group}", dict[str, float]()
        if number and not setting.has_time_for(SECONDS):
            emit(unchecked(figure, "no time was left"))
            continue
        for name, difference in members:
            if differences and not setting.has_time_for(SECONDS):
                break
            with torch.inference_mode():
                differences[name] = difference()
            emit(
                check(
                    figure,
                    max(differences.values()),
                    "relative difference",
                    differences,
                    most=TOLERANCE[dtype],
                )
            )


def cases(setting: Setting) -> Iterator[Callable[[], object]]:
    """A call for each case, in the order of `run`, in which the kernels are compared with themselves."""
    for _, _, members in _groups(setting, None):
        for _, difference in members:
            yield torch.inference_mode()(difference)


def _groups(setting: Setting, oracle: Kernels | None) -> Iterator[tuple[str, torch.dtype, Members]]:
    """Head sizes by dtype and mode, then what else served models compute, by mode; None: the kernels are the oracle."""
    scale, device = setting.scale, setting.device
    kernels = {
        mode: cuda_kernels(deterministic=deterministic) for mode, deterministic in MODES.items()
    }
    for dtype, (mode, each) in itertools.product(scale.checked_dtypes, kernels.items()):
        yield f"{name_of(dtype)}, {mode}", dtype, _head_sizes(each, oracle or each, dtype, setting)
    dtype = scale.parts.dtype
    for mode, each in kernels.items():
        members = scale.parts.differences(each, oracle or each, device)
        yield f"other parts, {name_of(dtype)}, {mode}", dtype, members


def _head_sizes(kernels: Kernels, oracle: Kernels, dtype: torch.dtype, setting: Setting) -> Members:
    for size in setting.scale.checked_head_dims:
        shape, device = LayerShape.small(size), setting.device
        yield (
            f"head size {size}",
            partial(largest_difference, kernels, oracle, dtype=dtype, shape=shape, device=device),
        )


def name_of(dtype: torch.dtype) -> str:
    """The name of `dtype` without torch's prefix."""
    return str(dtype).removeprefix("torch.")
