"""Types of host arrays, and empty columns of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]

_NO_INTS: Ints = np.empty(0, dtype=np.int64)
_NO_FLOATS: Floats = np.empty(0, dtype=np.float32)


def no_ints() -> Ints:
    return _NO_INTS


def no_floats() -> Floats:
    return _NO_FLOATS
