"""The most likely token of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_shard.kernels.build import operators_loaded


def choose_greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """From `logits` [R, V] float32: ids [R] int64, the first of equals, and their log probabilities [R] float32.

    The log probability is not finite where a logit is NaN or plus infinity. A row's bits depend on the row alone.
    """
    if logits.device.type == "cpu" and operators_loaded():
        ids = torch.empty(len(logits), dtype=torch.int64)
        logprobs = torch.empty(len(logits), dtype=torch.float32)
        torch.ops.millrace.greedy(ids, logprobs, logits.contiguous())
        return ids, logprobs
    best = logits.max(-1)
    # Of one long row `logsumexp` has its threads sum a part each; this sums every row by itself.
    logprobs = logits.log_softmax(-1).gather(1, best.indices[:, None]).squeeze(1)
    return best.indices, logprobs
