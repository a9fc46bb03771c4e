"""DARE's random masks, the same on each machine and in each run: a counter-based generator, splitmix64."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_MANTISSA_BITS = 53


def mask_key(digests: Sequence[str], position: int, tensor: str) -> int:
    """The seed of one tensor of the adapter at `position` among those with `digests`."""
    text = json.dumps([*digests, position, tensor]).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def kept(key: int, count: int, density: float) -> npt.NDArray[np.bool_]:
    """[count]: whether the value at each index is kept, with probability `density`; each depends on its index alone."""
    with np.errstate(over="ignore"):
        state = np.uint64(key) + _STEP * np.arange(1, count + 1, dtype=np.uint64)
        state = (state ^ (state >> np.uint64(30))) * _FACTORS[0]
        state = (state ^ (state >> np.uint64(27))) * _FACTORS[1]
        state ^= state >> np.uint64(31)
    uniform = (state >> np.uint64(64 - _MANTISSA_BITS)).astype(np.float64) * 2.0**-_MANTISSA_BITS
    return np.asarray(uniform < density)
