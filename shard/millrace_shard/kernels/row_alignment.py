"""Rows of scores that all have the same alignment in memory.

torch's softmax on CUDA adds up a row in an order that depends on the place of its first element within 16 bytes. If V
is no multiple of 4, that place depends on the row's number, and so would the bits of the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_shard.device import transfers

ALIGNMENT = 4
"""Elements float32 in 16 bytes."""


def aligned(scores: Tensor) -> Tensor:
    """`scores` [n, V] float32, padded to [n, W] by minus infinity if V is no multiple of 4; on CPU, as they are."""
    padding = -scores.shape[1] % ALIGNMENT
    if not padding or transfers.is_synchronous(scores.device):
        return scores
    return torch.nn.functional.pad(scores, (0, padding), value=float("-inf"))
