"""Penalties for the tokens that a sequence contains, and forbidden ids. Rows are independent and exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_GENERATED = 1 << 32
"""One int64 holds two counts of an id: of all tokens in the low half, of generated tokens in the high half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Penalties of n rows, each [n, 1] float32 on the scores' device."""

    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    openai_frequency: Tensor
    uses_counts: bool
    """Whether any row has a penalty that depends on the counts of its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastTokens:
    """The tokens of n sequences: the prompt, then the generated tokens."""

    ids: Tensor
    """[n, L] int64; undefined past a row's length."""
    lengths: Tensor
    """[n, 1] int64, at least 1."""
    num_prompt: Tensor
    """[n, 1] int64, the length of the prompt."""


def penalise(scores: Tensor, rows: Tensor, tokens: PastTokens, penalties: Penalties) -> None:
    """Apply the repetition, frequency, presence and OpenAI frequency penalties to `rows` [n] of scores [R, V] float32.

    The order is as named, the change in place, and only ids that a sequence contains change. Finite scores stay finite,
    however large a penalty is, and minus infinity stays.
    """
    columns = torch.arange(tokens.ids.shape[1], device=scores.device)
    held = columns < tokens.lengths
    # Padding is replaced by the row's first token: the same value is then written to its score several times.
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
    """`changed` scores, clamped to finite values, but equal to `before` where that is infinite."""
    limits = torch.finfo(changed.dtype)
    return torch.where(before.isinf(), before, changed.clamp_(limits.min, limits.max))


def forbid(scores: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Set the scores of `ids` [m] in `rows` [n] to minus infinity, in place."""
    scores[rows[:, None], ids[None, :]] = float("-inf")


def forbid_if_others(scores: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Forbid `ids` as `forbid` does, except in rows that would have no possible token left."""
    place = (rows[:, None], ids[None, :])
    before = scores[place]
    scores[place] = float("-inf")
    has_others = scores.index_select(0, rows).amax(-1, keepdim=True) > float("-inf")
    # With a NaN in the row the comparison is false: the scores stay as they are, and the row fails.
    scores[place] = torch.where(has_others, float("-inf"), before)
