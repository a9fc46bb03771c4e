"""Gives back the memory of file pages that were read through a mapping."""

from __future__ import annotations

import ctypes
import functools
import mmap

from torch import Tensor

from millrace_shard.mapped_files import ON_LINUX


def release_pages(found: Tensor) -> None:
    """Let the system take back the pages under `found`, a view into a mapped file that is not needed any more.

    They stay in the page cache, and are read again if they are needed after all; until then they do not count as this
    process's. Without it, a checkpoint is resident twice while it is loaded. Elsewhere than on Linux, nothing happens.
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
