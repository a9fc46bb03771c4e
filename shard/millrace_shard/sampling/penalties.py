"""Changes to scores for what a sequence already holds, and for how short it still is. Exact, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_GENERATED = 1 << 32
"""Above the count of all a sequence's tokens that are one id, the count of the generated ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Columns of n rows on the scores' device, [n, 1] float32; see the wire for their neutral values."""

    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    openai_frequency: Tensor
    uses_counts: bool
    """Whether any row has another penalty than the one for repetition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastTokens:
    """What n sequences hold: prompt, then generated tokens."""

    ids: Tensor
    """[n, L] int64; anything at all past a row's length."""
    lengths: Tensor
    """[n, 1] int64, at least 1."""
    num_prompt: Tensor
    """[n, 1] int64; tokens from there on are generated ones."""


def penalise(scores: Tensor, rows: Tensor, tokens: PastTokens, penalties: Penalties) -> None:
    """Apply repetition, frequency, presence and occurrence penalty to n `rows` of scores [R, V] float32, in place.

    In this order, to the ids that a sequence holds; for others there is nothing to do. Scores are finite where they
    were, however large a penalty is, and minus infinity where they were that.
    """
    columns = torch.arange(tokens.ids.shape[1], device=scores.device)
    held = columns < tokens.lengths
    # Where a row has no token its first one stands again, for which the same score is found again.
    ids = torch.where(held, tokens.ids, tokens.ids[:, :1])
    line = scores.view(-1)
    places = rows[:, None] * scores.shape[1] + ids
    before = line[places]
    penalty = penalties.repetition
    after = finite(torch.where(before < 0, before * penalty, before / penalty), before)
    if penalties.uses_counts:
        is_generated = columns >= tokens.num_prompt
        ones = held * torch.where(is_generated, 1 + _GENERATED, 1)
        counted = torch.zeros(len(ids), scores.shape[1], dtype=torch.int64, device=scores.device)
        counts = counted.scatter_add_(1, ids, ones).gather(1, ids)
        in_all = (counts & (_GENERATED - 1)).to(torch.float32)
        generated = (counts >> 32).to(torch.float32)
        after = finite(after - penalties.frequency * in_all / tokens.lengths, after)
        after = finite(after - penalties.presence * (generated > 0), after)
        after = finite(after - penalties.openai_frequency * generated, after)
    line[places] = after


def finite(changed: Tensor, before: Tensor) -> Tensor:
    """`changed` scores without overflow: finite where `before` was, and what `before` was where it was infinite."""
    limits = torch.finfo(changed.dtype)
    return torch.where(before.isinf(), before, changed.clamp_(limits.min, limits.max))


def forbid(scores: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Set the scores of `ids` [m] in `rows` [n] to minus infinity, in place."""
    scores[rows[:, None], ids[None, :]] = float("-inf")


def forbid_if_others(scores: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Do as `forbid`, but leave a row alone that would have nothing possible left."""
    place = (rows[:, None], ids[None, :])
    before = scores[place]
    scores[place] = float("-inf")
    has_others = scores.index_select(0, rows).amax(-1, keepdim=True) > float("-inf")
    # What is no number stays so, and its row fails.
    scores[place] = torch.where(has_others, float("-inf"), before)
