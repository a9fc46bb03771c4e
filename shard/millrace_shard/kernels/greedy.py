"""The most likely token of each row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from millrace_shard.kernels.build import operators_loaded
from millrace_shard.kernels.row_alignment import aligned


class Best(NamedTuple):
    """The most likely tokens of R rows."""

    ids: Tensor
    """[R] int64, the first among equals."""
    logprobs: Tensor
    """[R] float32; not finite where a logit is NaN or plus infinity."""
    failed: Tensor
    """[R] bool, where `logprobs` is not finite."""


def choose_greedy(logits: Tensor) -> Best:
    """The most likely tokens of `logits` [R, V] float32. A row's bits depend on the row alone."""
    if logits.device.type == "cpu" and operators_loaded():
        return Best(*torch.ops.millrace.greedy(logits.contiguous()))
    best = logits.max(-1)
    # `logsumexp` splits a single long row over threads; `log_softmax` sums every row in one thread.
    logprobs = aligned(logits).log_softmax(-1).gather(1, best.indices[:, None]).squeeze(1)
    return Best(best.indices, logprobs, ~logprobs.isfinite())
