"""The most likely token of each row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from millrace_shard.kernels.build import operators_loaded


class Best(NamedTuple):
    """Of R rows."""

    ids: Tensor
    """[R] int64, the first of equals."""
    logprobs: Tensor
    """[R] float32; not finite where a logit is NaN or plus infinity."""
    failed: Tensor
    """[R] bool, where they are not finite."""


def choose_greedy(logits: Tensor) -> Best:
    """The best of `logits` [R, V] float32. A row's bits depend on the row alone."""
    if logits.device.type == "cpu" and operators_loaded():
        return Best(*torch.ops.millrace.greedy(logits.contiguous()))
    best = logits.max(-1)
    # Of one long row `logsumexp` has its threads sum a part each; this sums every row by itself.
    logprobs = logits.log_softmax(-1).gather(1, best.indices[:, None]).squeeze(1)
    return Best(best.indices, logprobs, ~logprobs.isfinite())
