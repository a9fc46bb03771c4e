"""Writes float32 numbers in JSON with as few digits as distinguish them from their neighbours."""

from __future__ import annotations

from math import isfinite
from struct import Struct

_FLOAT32 = Struct("<f")
_pack = _FLOAT32.pack
_SMALLEST_NORMAL = 2.0**-126
_SHORTER = ("%.8g", "%.7g", "%.6g")
"""Formats shorter than nine digits; below six digits `%g` itself drops zeros."""
_SHORTER_SUBNORMAL = (*_SHORTER, "%.5g", "%.4g", "%.3g", "%.2g", "%.1g")


def shortest(value: float) -> float | None:
    """Return the double whose shortest decimal is the shortest one of `value` as a float32.

    A JSON writer prints -1.3242188 for it instead of the widened -1.32421875. None stands for NaN and infinity, which
    JSON does not have. Raises OverflowError for a number beyond the range of float32.
    """
    if not isfinite(value):
        return None
    if value == 0.0:
        return value
    bits = _pack(value)
    best: float | None = None
    # A decimal of n digits is at least as close as one of n - 1 digits, so the first failure ends the search.
    for form in _SHORTER if abs(value) >= _SMALLEST_NORMAL else _SHORTER_SUBNORMAL:
        shorter = float(form % value)
        if _pack(shorter) != bits:
            break
        best = shorter
    return float(f"{value:.9g}") if best is None else best


def rounded(value: float) -> float:
    """Round to the nearest float32, the type of the wire.

    Raises:
        ValueError: the number is too large for a float32.

    """
    try:
        (result,) = _FLOAT32.unpack(_pack(value))
    except OverflowError:
        raise ValueError("number out of range") from None
    return float(result)
