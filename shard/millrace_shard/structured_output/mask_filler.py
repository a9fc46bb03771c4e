"""Masks of several matchers, written one after the other or by threads that need no interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray

Bits = NDArray[np.int32]

NUM_THREADS = 2
"""A mask takes 2 to 20 us as a rule: more threads would only take cores from the forward pass."""
NUM_SHARED = 4
"""Masks from which on it may pay to wake threads for them."""
PATIENCE_SECONDS = 0.5e-3
"""What it costs to wake threads where the forward pass has used every core, and masks of most grammars do not take."""


class MaskLines:
    """[M, W] int32 that stay where they are.

    To make an array and to find its address takes longer than most masks, all the more where the forward pass has used
    the caches.
    """

    def __init__(self, num_lines: int, width: int) -> None:
        self.bits: Bits = np.empty((num_lines, width), dtype=np.int32)
        self.address = self.bits.ctypes.data
        self.num_bytes = self.bits.strides[0]
        """Of a line."""

    def __len__(self) -> int:
        return len(self.bits)


class MaskFiller:
    """Used by one thread at a time. Who fills a mask changes nothing in it."""

    def __init__(self, *, beside: bool) -> None:
        """`beside` a thread that needs the interpreter, threads fill all masks from `NUM_SHARED` on."""
        self._patience = 0.0 if beside else PATIENCE_SECONDS
        self._executor = LLExecutor(NUM_THREADS)

    def fill(self, asked: Sequence[tuple[LLMatcher, int]], lines: MaskLines) -> None:
        """Write the mask of each matcher to its line, which has to be there.

        One after the other, which holds the interpreter, until that has taken too long; threads fill the rest.
        """
        address, num_bytes, num_lines = lines.address, lines.num_bytes, len(lines)
        until = perf_counter() + self._patience
        for place, (matcher, line) in enumerate(asked):
            if len(asked) - place >= NUM_SHARED and perf_counter() >= until:
                fill_next_token_bitmask_par(self._executor, list(asked[place:]), lines.bits)
                return
            assert 0 <= line < num_lines
            matcher.unsafe_compute_mask_ptr(address + line * num_bytes, num_bytes)
