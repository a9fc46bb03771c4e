"""All randomness there is: 24 bits a token, a pure function of a sequence's seed and the token's position."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
UNIFORM_BITS = 24


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """One integer of `UNIFORM_BITS` bits for each (seed, position): splitmix64's output, its top bits.

    `positions` are absolute indexes of the tokens to be sampled in their sequences.
    """
    z = seeds + (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    bits: NDArray[np.int64] = (z >> np.uint64(64 - UNIFORM_BITS)).astype(np.int64)
    return bits
