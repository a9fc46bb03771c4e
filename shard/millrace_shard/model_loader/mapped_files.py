"""Tensors in memory-mapped files: recognising them, and releasing their pages."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

ON_LINUX = sys.platform == "linux"
MAPS = Path("/proc/self/maps")


class MappedFiles:
    """The address ranges at which this process has `paths` mapped at construction (proc_pid_maps(5))."""

    def __init__(self, paths: Sequence[Path]) -> None:
        names = {str(path.resolve()) for path in paths}
        text = MAPS.read_text(errors="surrogateescape") if ON_LINUX else ""
        lines = [line.split(maxsplit=5) for line in text.split("\n")]
        self._places = [
            tuple(int(end, 16) for end in line[0].split("-"))
            for line in lines
            if line[5:] and line[5] in names
        ]

    def contains(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in a mapped file; outside Linux, true for every tensor on CPU, which may be mapped."""
        if not ON_LINUX:
            return tensor.device.type == "cpu"
        address = tensor.data_ptr()
        return any(begin <= address < end for begin, end in self._places)


def release_pages(found: Tensor) -> None:
    """Return the pages under `found`, a view into a mapped file, to the system.

    The pages stay in the page cache and are mapped again at the next access, but do not count as resident memory of
    this process. Otherwise a checkpoint would be resident twice while it is loaded. No effect outside Linux.
    """
    if not ON_LINUX or found.numel() == 0:
        return
    last = sum(
        (size - 1) * stride for size, stride in zip(found.shape, found.stride(), strict=True)
    )
    begin = -(-found.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (found.data_ptr() + (last + 1) * found.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        advice = mmap.MADV_DONTNEED
        _library().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
