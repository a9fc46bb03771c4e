"""CUDA graphs: work on the device that is recorded once and replayed over the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

NUM_WARM_UPS = 2
"""Runs before a capture, in which libraries and kernels compile and make allocations that they keep."""


class Captured(Protocol):
    """Recorded work."""

    def replay(self) -> Tensor:
        """Submit the work again; the next replay of any work of the same capture may overwrite the output."""


class Capture(Protocol):
    """Records work. All work of one capture shares memory, so that its replays must not overlap."""

    def __call__(self, compute: Callable[[], Tensor]) -> Captured:
        """Run `compute` a few times, then record it. It must read and write only tensors that never move.

        Raises torch.OutOfMemoryError, or RuntimeError for work that cannot be recorded.
        """


class CudaCapture:
    """Graphs in one memory pool, recorded on a separate stream and replayed on the stream of the caller."""

    def __init__(self) -> None:
        """Create a memory pool and a stream on the current device."""
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, compute: Callable[[], Tensor]) -> Captured:
        """Record `compute`, as Capture says."""
        caller = torch.cuda.current_stream()
        # A failed capture may leave its stream current.
        with torch.cuda.stream(caller):
            self._stream.wait_stream(caller)
            with torch.cuda.stream(self._stream):
                for _ in range(NUM_WARM_UPS):
                    compute()
            caller.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads that watch collectives and copies continue during the capture.
            with torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                capture_error_mode="thread_local",
            ):
                output = compute()
        return CudaGraph(graph, output)


class CudaGraph:
    """A graph and its output tensor."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph = graph
        self._output = output

    def replay(self) -> Tensor:
        """Submit the graph to the current stream."""
        self._graph.replay()
        return self._output
