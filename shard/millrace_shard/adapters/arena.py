"""The memory of adapters in pages; on a GPU one tensor, reserved before the KV capacity is measured, which never moves.

An adapter has a run of consecutive pages, so that kernels add an offset to one address and look up no page. A load that
finds no run that is long enough moves the adapters together, between two steps: a copy within the device, whose end
later steps wait for as they do for any work before them.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from millrace_shard.kernels.lora.adapter_table import (
    DEPTH,
    SLICE,
    LoraPart,
    PackedAdapter,
    PackedPart,
)

PAGE_BYTES = 1 << 16
FACTOR_BYTES = 4


def bytes_per_slice(part: LoraPart, dtype: torch.dtype) -> int:
    """Memory on this rank for 16 ranks of a module: A, B and factors. A bias needs less and counts as much."""
    inputs, outputs = rounded_up(part.num_inputs, DEPTH), rounded_up(part.num_outputs, SLICE)
    return SLICE * ((inputs + outputs) * dtype.itemsize + FACTOR_BYTES)


def num_slices(rank: int) -> int:
    """Slices of a module of an adapter with `rank` ranks."""
    return -(-rank // SLICE)


def num_pages(slices: Iterable[tuple[LoraPart, int]], dtype: torch.dtype) -> int:
    """Pages of an adapter, whose modules have these numbers of slices, one more with a bias."""
    total = sum(count * bytes_per_slice(part, dtype) for part, count in slices)
    return -(-total // PAGE_BYTES)


def rounded_up(count: int, multiple: int) -> int:
    """The least multiple that is at least `count`."""
    return -(-count // multiple) * multiple


class Run(NamedTuple):
    """Consecutive pages."""

    first: int
    size: int

    @property
    def end(self) -> int:
        """The page behind the last one."""
        return self.first + self.size


class PageRuns:
    """Which pages are held; any thread may call the methods."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._held: list[Run] = []
        """Ascending."""
        self._lock = Lock()

    def allocate(self, count: int) -> Run | None:
        """The first free run of `count` pages; None if there is none."""
        with self._lock:
            start = 0
            for index, held in enumerate([*self._held, Run(self.num_pages, 0)]):
                if held.first - start >= count:
                    run = Run(start, count)
                    self._held.insert(index, run)
                    return run
                start = held.end
            return None

    @property
    def num_free(self) -> int:
        with self._lock:
            return self.num_pages - sum(run.size for run in self._held)

    def free(self, run: Run) -> None:
        with self._lock:
            self._held.remove(run)

    def compact(self) -> dict[Run, Run]:
        """Move all runs to the front; returns the new run of each that moves, in the order in which they can move."""
        with self._lock:
            moves, held, start = dict[Run, Run](), list[Run](), 0
            for run in self._held:
                moved = Run(start, run.size)
                if moved != run:
                    moves[run] = moved
                held.append(moved)
                start = moved.end
            self._held = held
            return moves


ALIGNMENT = 64
"""Bytes to which addresses of tensors are aligned, as loads of 16 bytes need it."""


class AdapterArena:
    """`num_pages` pages on `device`; packed tensors are copied into it on a separate stream."""

    def __init__(self, num_pages: int, device: torch.device) -> None:
        self.runs = PageRuns(num_pages)
        self._memory = torch.empty(num_pages * PAGE_BYTES, dtype=torch.uint8, device=device)
        self._stream: torch.cuda.Stream | None = None
        self._released: torch.cuda.Event | None = None
        """The end of the steps that may have read pages that are free, and of copies out of them."""
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._record()

    def write(self, run: Run, adapter: PackedAdapter) -> PackedAdapter:
        """`adapter`, packed in host memory, in the pages of `run`; returns when it is there. For any one thread."""
        host = torch.zeros(run.size * PAGE_BYTES, dtype=torch.uint8)
        if self._stream is not None:
            host = host.pin_memory()
        start = run.first * PAGE_BYTES
        parts = _laid_out(adapter, host, self._memory[start : start + len(host)])
        self._copy(start, host)
        return replace(adapter, parts=parts, first_page=run.first)

    def release(self, adapter: PackedAdapter) -> None:
        """Free the pages of an adapter that has left its slot; on the engine thread, whose steps may have read them."""
        self._record()
        self.runs.free(run_of(adapter))

    def compact(self, adapters: Iterable[PackedAdapter]) -> list[PackedAdapter]:
        """Move all `adapters` together, and return them; on the engine thread, while none is being written."""
        moves = self.runs.compact()
        for source, target in moves.items():
            self._move(source, target)
        self._record()
        return [self._moved(adapter, moves.get(run_of(adapter))) for adapter in adapters]

    def _copy(self, start: int, host: Tensor) -> None:
        target = self._memory[start : start + len(host)]
        stream = self._stream
        if stream is None:
            target.copy_(host)
            return
        if self._released is not None:
            stream.wait_event(self._released)
        with torch.cuda.stream(stream):
            target.copy_(host, non_blocking=True)
        stream.synchronize()

    def _move(self, source: Run, target: Run) -> None:
        """Copy in pieces that do not overlap their targets."""
        step = (source.first - target.first) * PAGE_BYTES
        begin, end = source.first * PAGE_BYTES, source.end * PAGE_BYTES
        for start in range(begin, end, step):
            piece = self._memory[start : min(start + step, end)]
            self._memory[start - step : start - step + len(piece)].copy_(piece)

    def _moved(self, adapter: PackedAdapter, target: Run | None) -> PackedAdapter:
        if target is None:
            return adapter
        shift = (target.first - run_of(adapter).first) * PAGE_BYTES
        origin = self._memory.data_ptr()
        parts = {
            index: _with_tensors(
                part,
                [
                    None
                    if each is None
                    else _view(self._memory, each.data_ptr() - origin + shift, each)
                    for each in _tensors(part)
                ],
            )
            for index, part in adapter.parts.items()
        }
        return replace(adapter, parts=parts, first_page=target.first)

    def _record(self) -> None:
        if self._stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._memory.device))
            self._released = event


def run_of(adapter: PackedAdapter) -> Run:
    """The pages of an adapter in the arena."""
    assert adapter.first_page is not None, "it is in the arena"
    return Run(adapter.first_page, adapter.num_pages)


def together(adapter: PackedAdapter) -> PackedAdapter:
    """`adapter`, packed in host memory, in one piece of it, on huge pages where the system has them.

    A step with many adapters reads each of them once, in the order of the parts.
    """
    tensors = (each for part in adapter.parts.values() for each in _tensors(part))
    size = sum(rounded_up(each.nbytes, ALIGNMENT) for each in tensors if each is not None)
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return replace(adapter, parts=_laid_out(adapter, whole, whole))


def _laid_out(adapter: PackedAdapter, host: Tensor, target: Tensor) -> dict[int, PackedPart]:
    """Copy the tensors of `adapter` into `host` [n] uint8; returns its parts as they will be in `target` [n]."""
    end, parts = 0, dict[int, PackedPart]()
    for index, part in sorted(adapter.parts.items()):
        placed: list[Tensor | None] = []
        for tensor in _tensors(part):
            view = None
            if tensor is not None:
                values = tensor.contiguous().flatten().view(torch.uint8)
                host[end : end + len(values)] = values
                view = _view(target, end, tensor)
                end = rounded_up(end + len(values), ALIGNMENT)
            placed.append(view)
        parts[index] = _with_tensors(part, placed)
    return parts


def _view(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """A tensor of the dtype and shape of `like` at a byte of `memory`."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _tensors(part: PackedPart) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return part.a, part.b, part.factors, part.bias


def _with_tensors(part: PackedPart, tensors: list[Tensor | None]) -> PackedPart:
    a, b, factors, bias = tensors
    assert a is not None, "only a bias is optional"
    assert b is not None
    assert factors is not None
    return replace(part, a=a, b=b, factors=factors, bias=bias)
