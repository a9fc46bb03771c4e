"""Work on the device that is recorded once and run again over the same memory: a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

NUM_WARM_UPS = 2
"""Runs before a capture, in which libraries and kernels allocate, compile and choose what they keep."""


class Captured(Protocol):
    """Recorded work."""

    def replay(self) -> Tensor:
        """Submit it again; its output, which the next replay of any work of the same capture may overwrite."""


class Capture(Protocol):
    """Records work; what one capture recorded shares memory, so its replays never overlap."""

    def __call__(self, compute: Callable[[], Tensor]) -> Captured:
        """Record `compute`, which reads and writes only what stays where it is. Runs it a few times first.

        Raises torch.OutOfMemoryError, or RuntimeError for work that cannot be recorded.
        """


class CudaCapture:
    """Graphs in one memory pool, recorded on a stream of their own and replayed on the caller's."""

    def __init__(self) -> None:
        """For the current device."""
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, compute: Callable[[], Tensor]) -> Captured:
        """Record `compute`."""
        caller = torch.cuda.current_stream()
        # A capture that fails may leave its stream current.
        with torch.cuda.stream(caller):
            self._stream.wait_stream(caller)
            with torch.cuda.stream(self._stream):
                for _ in range(NUM_WARM_UPS):
                    compute()
            caller.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Threads that watch over collectives and copies go on meanwhile.
            with torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                capture_error_mode="thread_local",
            ):
                output = compute()
        return CudaGraph(graph, output)


class CudaGraph:
    """A graph and the memory of its output."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph = graph
        self._output = output

    def replay(self) -> Tensor:
        """Submit the graph to the current stream."""
        self._graph.replay()
        return self._output
