"""The DRY penalty of one sequence ("don't repeat yourself"), on its device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millrace_proto.sampling import Dry
from millrace_shard.device.transfers import upload
from millrace_shard.sampling.penalties import finite

MAX_LENGTH = 50
"""Longer passages count as this long: the penalty is beyond every score by then."""
FLOAT32 = np.finfo(np.float32)


class DryPenalty:
    """Lowers the tokens that would extend a repeated passage."""

    def __init__(self, dry: Dry, vocab_size: int, device: torch.device) -> None:
        self._window = dry.window
        is_breaker = np.zeros(vocab_size, dtype=np.bool_)
        is_breaker[list(dry.breakers)] = True
        self._is_breaker = upload(is_breaker, device)
        self._penalties = upload(_penalties(dry), device)

    def apply(self, line: Tensor, tokens: Tensor, position: Tensor, most: int) -> None:
        """Change `line` [V] float32 in place; finite scores stay finite.

        `tokens` [L] int32 are those of the sequence, the first `position` [] of which count, at most `most`.
        """
        width = min(most, self._window or most)
        places = position - width + torch.arange(width, device=line.device)
        held = tokens[places.clamp(min=0)].long()
        # Before the first token there is nothing: it equals no token, and ends every passage.
        can_match = (places >= 0) & ~self._is_breaker[held]
        lengths = _lengths(held, can_match)
        following = held[1:]
        longest = torch.zeros(len(line), dtype=torch.int64, device=line.device)
        longest.scatter_reduce_(
            0, following, lengths.masked_fill(self._is_breaker[following], 0), "amax"
        )
        line.copy_(finite(line - self._penalties[longest], line))


def _lengths(held: Tensor, can_match: Tensor) -> Tensor:
    """Return how many tokens up to each but the last of `held` [N] equal those up to the last: [N - 1] int64."""
    count = len(held) - 1
    lengths = torch.zeros(count, dtype=torch.int64, device=held.device)
    goes_on = torch.ones(count, dtype=torch.bool, device=held.device)
    for back in range(min(MAX_LENGTH, count)):
        end = len(held) - 1 - back
        # The token `back` places before each of the places `back` to `count`.
        equal = (held[: count - back] == held[end]) & can_match[: count - back] & can_match[end]
        goes_on[back:] &= equal
        goes_on[:back] = False
        lengths += goes_on
    return lengths


def _penalties(dry: Dry) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return the penalty of each length up to MAX_LENGTH, computed in float64; no passage has none."""
    lengths = np.arange(MAX_LENGTH + 1)
    is_free = lengths < max(1, dry.allowed_length)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        penalties = dry.multiplier * np.float64(dry.base) ** (lengths - dry.allowed_length)
    # Zero times an infinite power is no penalty.
    bounded = np.nan_to_num(np.where(is_free, 0.0, penalties), nan=0.0)
    clipped: np.ndarray[tuple[int], np.dtype[np.float32]] = np.clip(bounded, 0, FLOAT32.max).astype(
        np.float32
    )
    return clipped
