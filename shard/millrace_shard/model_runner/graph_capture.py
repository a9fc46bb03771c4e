"""CUDA graphs: work on the device that is recorded once and replayed over the same memory, for some batch sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class CaptureError(RuntimeError):
    """A capture has failed. torch cannot take back the memory of its graph."""


class Captured(Protocol):
    """Recorded work."""

    @property
    def output(self) -> Tensor:
        """The output of every replay, which never moves."""

    def replay(self) -> Tensor:
        """Submit the work again; the next replay of any work of the same capture may overwrite the output."""


class Capture(Protocol):
    """Records work. All work of one capture shares memory, so that its replays must not overlap."""

    def warm_up(self, compute: Callable[[], Tensor]) -> None:
        """Run `compute` outside a capture, on the stream of captures, as often as needed before `record`.

        Libraries and kernels compile and make allocations that they keep. Raises any error of `compute`, and
        RuntimeError if it waits for the device, which work in a graph cannot do.
        """

    def record(self, compute: Callable[[], Tensor]) -> Captured:
        """Record `compute`, which is warmed up and reads and writes only tensors that never move.

        Raises CaptureError. No capture may follow in the same process.
        """


class CudaCapture:
    """Graphs in one memory pool, recorded on a separate stream and replayed on the stream of the caller."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        """Record on `stream`, or on a new one."""
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def warm_up(self, compute: Callable[[], Tensor]) -> None:
        """Run `compute` twice; compilation may wait for the device, so only the second run may not."""
        caller = torch.cuda.current_stream()
        self._stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._stream):
                compute()
                with waits_as_errors():
                    compute()
        finally:
            caller.wait_stream(self._stream)

    def record(self, compute: Callable[[], Tensor]) -> Captured:
        graph = torch.cuda.CUDAGraph()
        try:
            # A failed capture may leave its stream current. Other threads that watch collectives and copies continue
            # during the capture.
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(
                    graph,
                    pool=self._pool,
                    stream=self._stream,
                    capture_error_mode="thread_local",
                ),
            ):
                output = compute()
        except RuntimeError as error:
            # The end of a failed capture raises another error than its cause.
            raise CaptureError(str(error.__context__ or error)) from error
        return CudaGraph(graph, output)


class CudaCaptures:
    """Makes the captures of a process, which share a stream: cuBLAS keeps 32 MiB for each stream that it runs on."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def __call__(self) -> CudaCapture:
        """A capture with its own memory pool."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        return CudaCapture(self._stream)


class CudaGraph:
    """A graph and its output tensor."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> Tensor:
        self._graph.replay()
        return self.output


@contextmanager
def waits_as_errors() -> Iterator[None]:
    """Raise RuntimeError at every operation inside that waits for the device, as far as torch knows them."""
    earlier = torch.cuda.get_sync_debug_mode()
    try:
        # The first call in a process warns after it has set the mode, and a program may turn warnings into errors.
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(earlier)


MOST_WAIT = 0.25
"""The wait for a device that has computed while work was launched, as a share of the time of the launches."""


def launches_outlast(
    compute: Callable[[], None],
    synchronize: Callable[[], None] = torch.cuda.synchronize,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Whether the device has nearly computed everything once the last part of `compute` is launched.

    `compute` is launched twice, since kernels and libraries may compile. Raises any error of it.
    """
    compute()
    synchronize()
    began = clock()
    compute()
    launched = clock()
    synchronize()
    return clock() - launched < MOST_WAIT * (launched - began)


SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16))
"""The sizes without `--cuda-graphs`: above 8 rows a batch gets at most 7 rows of padding, above 64 at most 15.

The number of sizes bounds the time of the captures.
"""
FIRST_TO_END_FAILED_CAPTURES = (2, 13)
"""Earlier versions of torch leave a failed capture open: torch.cuda.empty_cache() raises an error ever after."""


@dataclass(slots=True)
class GraphSettings:
    """The graphs to capture and the way to capture them; the captures of a process share one instance."""

    sizes: tuple[int, ...] | None
    """None: SIZES up to the largest batch, and this batch."""
    new_capture: Callable[[], Capture]
    outlast: Callable[[Callable[[], None]], bool] = lambda _: False
    """Whether the launches of some work take longer than the device computes it; see `launches_outlast`."""
    large_pieces: tuple[int, ...] | None = None
    """The numbers of tokens for which they do, once that has been measured: every warm-up captures the same graphs."""
    not_capturable: set[str] = field(default_factory=set)
    """Kinds of graphs whose work has turned out to wait or to be replayed wrongly. No later warm-up captures them."""
    capture_failed: bool = False
    """Whether a capture has failed, whose memory is lost until the process ends. No other capture follows."""

    def sizes_up_to(self, max_batch_size: int) -> list[int]:
        """The sizes to capture for batches of at most `max_batch_size` rows, largest first."""
        if self.sizes is None:
            sizes = {min(size, max_batch_size) for size in SIZES}
        else:
            sizes = {size for size in self.sizes if 0 < size <= max_batch_size}
        return sorted(sizes, reverse=True)

    def may_capture(self, kind: str) -> bool:
        return not self.capture_failed and kind not in self.not_capturable

    @property
    def holds_cache(self) -> bool:
        """Whether torch can never return its cached memory to the device, because a failed capture is open."""
        return self.capture_failed and not ends_failed_captures(torch.__version__)


def ends_failed_captures(version: str) -> bool:
    """Whether torch of this version, such as 2.13.0+cu130, ends a graph capture that fails."""
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= FIRST_TO_END_FAILED_CAPTURES


def empty_cache(device: torch.device, graphs: GraphSettings | None) -> None:
    """Return the memory that torch caches to a CUDA device, if torch can."""
    if device.type == "cuda" and not (graphs is not None and graphs.holds_cache):
        torch.cuda.empty_cache()
