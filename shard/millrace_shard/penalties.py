"""Changes to scores for what a sequence already holds, and for how short it still is. Exact, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Columns of n rows on the scores' device, [n, 1] float32; see the wire for their neutral values."""

    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    occurrence: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What n sequences hold: prompt, then generated tokens."""

    ids: Tensor
    """[n, L] int64; anything at all past a row's length."""
    lengths: Tensor
    """[n, 1] int64, at least 1."""
    num_prompt: Tensor
    """[n, 1] int64; tokens from there on are generated ones."""


def penalise(scores: Tensor, history: History, penalties: Penalties) -> Tensor:
    """Scores [n, V] float32 after repetition, frequency, presence and occurrence penalty, in this order.

    They are finite where the scores given were, however large a penalty is.
    """
    columns = torch.arange(history.ids.shape[1], device=scores.device)
    held = columns < history.lengths
    # Where a row has no token its first one is repeated, which changes nothing.
    ids = torch.where(held, history.ids, history.ids[:, :1])
    scores = _repetition(scores, ids, penalties.repetition)
    ones = held.to(torch.float32)
    counts = torch.zeros_like(scores).scatter_add_(1, ids, ones)
    scores = _finite(scores - penalties.frequency * counts / history.lengths)
    generated = ones * (columns >= history.num_prompt)
    counts = torch.zeros_like(scores).scatter_add_(1, ids, generated)
    scores = _finite(scores - penalties.presence * (counts > 0))
    return _finite(scores - penalties.occurrence * counts)


def _finite(scores: Tensor) -> Tensor:
    """Overflow undone, in place; NaN stays what it is."""
    limits = torch.finfo(scores.dtype)
    return scores.clamp_(limits.min, limits.max)


def _repetition(scores: Tensor, ids: Tensor, penalty: Tensor) -> Tensor:
    seen = scores.gather(1, ids)
    penalised = torch.where(seen < 0, seen * penalty, seen / penalty)
    return scores.scatter(1, ids, _finite(penalised))


def forbid(scores: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Set the scores of `ids` [m] in `rows` [n] to minus infinity, in place."""
    scores[rows[:, None], ids[None, :]] = float("-inf")
