"""Bitmasks over the vocabulary, filled one by one or by threads that need no interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray

Bits = NDArray[np.int32]

NUM_THREADS = 2
"""Most masks take 2 to 20 us, so that more threads would only take cores from the forward pass."""
NUM_SHARED = 4
"""The least number of masks for which threads may be faster."""
ALONE_SECONDS = 0.5e-3
"""Time of one thread before others help: to wake threads costs as much while the forward pass has every core."""


class MaskLines:
    """[M, W] int32 at a fixed address.

    To create an array and to find its address takes longer than most masks, especially while the forward pass fills
    the caches.
    """

    def __init__(self, num_lines: int, width: int) -> None:
        self.bits: Bits = np.empty((num_lines, width), dtype=np.int32)
        self.address = self.bits.ctypes.data
        self.num_bytes = self.bits.strides[0]
        """Bytes of a line."""

    def __len__(self) -> int:
        return len(self.bits)


class MaskFiller:
    """Fills masks for one thread at a time. The number of threads does not change a mask."""

    def __init__(self, *, overlap: bool) -> None:
        """With `overlap` another thread needs the interpreter, so that threads fill `NUM_SHARED` masks or more."""
        self._alone_seconds = 0.0 if overlap else ALONE_SECONDS
        self._executor = LLExecutor(NUM_THREADS)

    def fill(self, asked: Sequence[tuple[LLMatcher, int]], lines: MaskLines) -> None:
        """Fill the mask of each matcher into its line, which must exist.

        The calling thread fills masks with the interpreter lock until this has taken too long; threads fill the rest.
        """
        address, num_bytes, num_lines = lines.address, lines.num_bytes, len(lines)
        until = perf_counter() + self._alone_seconds
        for place, (matcher, line) in enumerate(asked):
            if len(asked) - place >= NUM_SHARED and perf_counter() >= until:
                fill_next_token_bitmask_par(self._executor, list(asked[place:]), lines.bits)
                return
            assert 0 <= line < num_lines
            matcher.unsafe_compute_mask_ptr(address + line * num_bytes, num_bytes)


def bits_of(ids: Sequence[int], width: int) -> Bits:
    """[width]: the mask of `ids`."""
    allowed = np.zeros(width * 32, dtype=np.bool_)
    allowed[list(ids)] = True
    return np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)


def allows(mask: Bits, token: int) -> bool:
    """Whether `mask` allows `token`, which may lie outside of the vocabulary."""
    return 0 <= token < mask.size * 32 and bool(mask[token >> 5] >> (token & 31) & 1)


def only_tokens(masks: Bits) -> list[tuple[int, int]]:
    """The lines of `masks` [N, W] that allow exactly one token, with this token."""
    found = []
    octets, size = masks.tobytes(), masks.shape[1] * masks.itemsize
    for line in range(len(masks)):
        mask = octets[line * size : (line + 1) * size]
        # From both ends, so that most bytes of a mask with many tokens are not read.
        rest = mask.strip(b"\0")
        if len(rest) == 1 and rest[0].bit_count() == 1:
            found.append((line, 8 * mask.index(rest) + rest[0].bit_length() - 1))
    return found
