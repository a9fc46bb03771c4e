"""Single-precision numbers in JSON: as few digits as tell them apart from their float32 neighbours."""

from __future__ import annotations

from math import isfinite
from struct import Struct

_FLOAT32 = Struct("f")
_pack = _FLOAT32.pack


def shortest(value: float) -> float | None:
    """Return the double whose shortest decimal is the shortest one of `value` as a float32.

    A JSON writer prints -1.3242188 for it instead of the widened -1.32421875. None stands for NaN and infinity, which
    JSON has not. `value` must lie within the range of float32.
    """
    if not isfinite(value):
        return None
    bits = _pack(value)
    # A decimal of n digits is no farther away than one of n - 1, so the first failure downwards ends the search.
    best = float(f"{value:.9g}")
    for text in (f"{value:.8g}", f"{value:.7g}", f"{value:.6g}"):
        shorter = float(text)
        if _pack(shorter) != bits:
            break
        best = shorter
    return best


def rounded(value: float) -> float:
    """Round to the nearest float32, which is what the wire carries.

    Raises:
        ValueError: the number is too large for a float32.

    """
    try:
        (result,) = _FLOAT32.unpack(_pack(value))
    except OverflowError:
        raise ValueError("number out of range") from None
    return float(result)
