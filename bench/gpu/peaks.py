"""The peaks of GPUs by their data sheets: bytes a second of the memory, and operations a second on bfloat16."""

from __future__ import annotations

import re
from dataclasses import dataclass

TB, TERA = 1e12, 1e12


@dataclass(frozen=True, slots=True)
class Peak:
    """A GPU's data sheet, without sparsity."""

    bandwidth: float
    """Bytes a second."""
    rate: float
    """Operations a second on bfloat16 with float32 sums."""


PEAKS = {
    "B200": Peak(8.0 * TB, 2250 * TERA),
    "GH200": Peak(4.0 * TB, 989 * TERA),
    "H200 NVL": Peak(4.8 * TB, 835 * TERA),
    "H200": Peak(4.8 * TB, 989 * TERA),
    "H100 NVL": Peak(3.9 * TB, 835 * TERA),
    "H100 PCIe": Peak(2.0 * TB, 756 * TERA),
    "H100": Peak(3.35 * TB, 989 * TERA),
    "A100 80GB PCIe": Peak(1.935 * TB, 312 * TERA),
    "A100-PCIE-40GB": Peak(1.555 * TB, 312 * TERA),
    "A100-SXM4-40GB": Peak(1.555 * TB, 312 * TERA),
    "A100": Peak(2.039 * TB, 312 * TERA),
    "A10G": Peak(0.6 * TB, 70 * TERA),
    "A10": Peak(0.6 * TB, 125 * TERA),
    "L40S": Peak(0.864 * TB, 362 * TERA),
    "L40": Peak(0.864 * TB, 181 * TERA),
    "L4": Peak(0.3 * TB, 121 * TERA),
    "RTX 6000 Ada": Peak(0.96 * TB, 364 * TERA),
    "RTX A6000": Peak(0.768 * TB, 155 * TERA),
    "RTX 5090": Peak(1.792 * TB, 209 * TERA),
    "RTX 4090": Peak(1.008 * TB, 165 * TERA),
    "RTX 3090": Peak(0.936 * TB, 71 * TERA),
}
"""By words of the name that the driver reports; of several that fit, the first one counts.

"H100" and "A100" without more words are SXM with 80 GB.
"""


def peak_of(name: str) -> Peak | None:
    """The peak of a device by its name, such as "NVIDIA H100 80GB HBM3"; None for one without an entry."""
    fits = (peak for words, peak in PEAKS.items() if re.search(rf"\b{re.escape(words)}\b", name))
    return next(fits, None)
