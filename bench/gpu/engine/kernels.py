"""The kernels for CUDA: on a GPU as the shard chooses them, and in Triton's interpreter on CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.engine.random_weights import read_description
from bench.harness.checkpoints import Shape
from millrace_shard.commands.device_settings import graph_settings, is_deterministic
from millrace_shard.config import ShardConfig
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.build import use_triton_cache
from millrace_shard.kernels.choose import choose_kernels
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.model_runner import piecewise_layers
from millrace_shard.model_runner.graph_capture import Capture, Captured, CaptureError, GraphSettings
from millrace_shard.models.description import ModelDescription

CUDA = torch.device("cuda")
INTERPRETED_TOKEN_COUNTS = (64,)
"""The largest pieces of layers take minutes in the interpreter."""


def kernels_for(
    config: ShardConfig,
    device: torch.device,
    dtype: torch.dtype,
    shape: LayerShape,
    *,
    is_checked: bool = True,
) -> Kernels:
    """The kernels for CUDA in the mode that `config` has on a GPU; plain torch with --disable-custom-kernels.

    On a GPU they are compared with plain torch first, as at a start, if that `is_checked`.
    """
    deterministic = is_deterministic(config, CUDA)
    is_compared = device.type == "cuda" and is_checked
    if not (is_compared or config.disable_custom_kernels):
        return cuda_kernels(deterministic=deterministic)
    return choose_kernels(
        device,
        dtype,
        deterministic=deterministic,
        shapes=(shape,),
        custom=not config.disable_custom_kernels,
    )


@torch.inference_mode()
def served_kernels(flags: Sequence[str], device: torch.device, shape: Shape, mode: str) -> Kernels:
    """The kernels for `shape` in bfloat16 as a server with `flags` and `--deterministic` on or off chooses them.

    On a GPU this runs the check of a start.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = ShardConfig.from_args([*flags, f"--deterministic={mode}", folder])
        read_description(config.model_folder, shape)
        layers = ModelDescription.read(config.model_folder).layer_shape(world_size=1)
        return kernels_for(config, device, torch.bfloat16, layers)


def cuda_kernels(*, deterministic: bool) -> Kernels:
    """The Triton kernels. Without a GPU, TRITON_INTERPRET must be set before the first call."""
    # All stages and servers compile into one cache.
    use_triton_cache()
    # Plain torch has to run where Triton is missing.
    from millrace_shard.kernels.cuda.operators import CudaKernels  # noqa: PLC0415

    return CudaKernels(deterministic=deterministic)


def graphs_for(config: ShardConfig, device: torch.device) -> GraphSettings | None:
    """The graphs of the shard; on CPU, of the same sizes, by repetition."""
    if device.type == "cuda":
        return graph_settings(config, device)
    return interpreted_graphs(config.cuda_graphs, RepeatingCapture)


def interpreted_graphs(
    sizes: tuple[int, ...] | None, new_capture: Callable[[], Capture]
) -> GraphSettings:
    """Graphs without pieces of layers for more tokens than a tile of the interpreter can have."""
    return GraphSettings(sizes, new_capture, large_pieces=())


@contextmanager
def few_pieces(device: torch.device) -> Iterator[None]:
    """On CPU, layers have pieces of INTERPRETED_TOKEN_COUNTS alone for the length of the block."""
    before = piecewise_layers.TOKEN_COUNTS
    if device.type == "cpu":
        vars(piecewise_layers)["TOKEN_COUNTS"] = INTERPRETED_TOKEN_COUNTS
    try:
        yield
    finally:
        vars(piecewise_layers)["TOKEN_COUNTS"] = before


@dataclass(frozen=True, slots=True)
class RepeatedWork:
    """Work without a graph that is run again over the same tensors, as a graph would be."""

    compute: Callable[[], Tensor]
    output: Tensor

    def replay(self) -> Tensor:
        """Run it again, into the memory of the first output."""
        return self.output.copy_(self.compute())


class RepeatingCapture:
    """A Capture that keeps work without a graph."""

    def warm_up(self, compute: Callable[[], Tensor]) -> None:
        """Run `compute` once."""
        compute()

    def record(self, compute: Callable[[], Tensor]) -> Captured:
        """Run `compute` once and keep it."""
        return RepeatedWork(compute, compute())


class RefusingCapture(RepeatingCapture):
    """A Capture that fails as CUDA's does for work that waits for the device."""

    def record(self, compute: Callable[[], Tensor]) -> Captured:
        """Fail at the end of the work."""
        compute()
        raise CaptureError("CUDA error: operation not permitted when stream is capturing")
