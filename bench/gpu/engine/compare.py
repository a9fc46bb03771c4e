"""Comparisons of the results of two runs of the same steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from millrace_shard.batch.step import StepResult


def distance(a: StepResult, b: StepResult) -> float:
    """The largest difference of a log probability; infinite for other rows and for NaN, 0 without tokens."""
    if a.slots.tolist() != b.slots.tolist() or len(a.ids) != len(b.ids):
        return float("inf")
    if not len(a.ids):
        return 0.0
    return float(np.nan_to_num(np.abs(a.logprobs - b.logprobs), nan=np.inf).max())


def other_tokens(a: StepResult, b: StepResult) -> int:
    """The number of tokens that differ or that one run lacks."""
    if len(a.ids) != len(b.ids):
        return max(len(a.ids), len(b.ids))
    return int((a.ids != b.ids).sum())


def largest_distance(ours: Sequence[StepResult], theirs: Sequence[StepResult]) -> float:
    """The largest `distance` of any step."""
    return max(distance(a, b) for a, b in zip(ours, theirs, strict=True))
