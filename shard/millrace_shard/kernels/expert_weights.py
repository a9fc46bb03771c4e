"""One rank's part of the weights of a mixture of experts, and the choice of experts by a router, in plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from millrace_shard.kernels.elementwise import elementwise
from millrace_shard.kernels.layer_weights import (
    Activation,
    ClampedSwiglu,
    LinearWeights,
    NormWeights,
)


class Scoring(Enum):
    """The function from a router's logits to the shares of experts."""

    SOFTMAX = "softmax"
    """The softmax over all experts."""
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"
    """The softmax over only the chosen experts."""
    SIGMOID = "sigmoid"
    """The sigmoid of each logit. Experts are chosen by it and a correction, which is not part of their shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """The choice of a token's experts, and their shares. Of equal experts the first is chosen."""

    top_k: int
    """Experts of a token."""
    scoring: Scoring
    renormalise: bool = False
    """Whether shares are divided by their sum."""
    num_groups: int = 1
    """Groups of neighbouring experts, of which the best are kept; a group counts by the sum of its two best experts."""
    top_groups: int = 1
    """Groups that are kept."""
    scale: float = 1.0
    """A factor of all shares."""

    def choose(self, logits: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The chosen experts [T, top_k] int64, best first, and their shares [T, top_k] float32.

        `logits` is [T, E] float32, and `correction` [E] float32 is for sigmoids.
        """
        if self.scoring is not Scoring.SIGMOID:
            chosen = _best(logits, self.top_k)
            if self.scoring is Scoring.SOFTMAX:
                shares = logits.softmax(-1).gather(1, chosen)
            else:
                shares = logits.gather(1, chosen).softmax(-1)
        else:
            scores = _sigmoid(logits)
            ranked = scores if correction is None else scores + correction
            if self.num_groups > 1:
                ranked = self._within_groups(ranked)
            chosen = _best(ranked, self.top_k)
            shares = scores.gather(1, chosen)
        if self.renormalise:
            total = shares[:, 0]
            for rank in range(1, self.top_k):
                total = total + shares[:, rank]
            shares = shares / (total + TINY).unsqueeze(1)
        return chosen, shares if self.scale == 1 else shares * self.scale

    def _within_groups(self, ranked: Tensor) -> Tensor:
        """`ranked` [T, E] with minus infinity outside the best groups."""
        groups = ranked.view(len(ranked), self.num_groups, -1)
        first, second = groups.sort(dim=-1, descending=True).values[..., :2].unbind(-1)
        top = _best(first + second, self.top_groups)
        outside = torch.ones(groups.shape[:2], dtype=torch.bool, device=ranked.device)
        outside.scatter_(1, top, value=False)
        return groups.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(1)


TINY = 1e-20
"""Keeps a sum of shares of 0 from dividing by 0."""


def _best(scores: Tensor, count: int) -> Tensor:
    """The indexes of the `count` best scores of each row, best first; of equal scores the first. [T, count] int64."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _sigmoid(x: Tensor) -> Tensor:
    return elementwise(torch.sigmoid, x) if x.device.type == "cpu" else x.sigmoid()


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterWeights:
    """The linear that scores all experts, in float32, and the rule that chooses by the scores."""

    weight: Tensor
    """[E, hidden] float32."""
    bias: Tensor | None
    """[E] float32."""
    correction: Tensor | None
    """[E] float32, see `RoutingRule.choose`."""
    rule: RoutingRule


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """One expert."""

    gate_up: LinearWeights
    """[2 * inter, hidden], gates first."""
    down: LinearWeights
    """[hidden, inter]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsWeights:
    """The experts of a layer and their router."""

    router: RouterWeights
    experts: Iterable[ExpertWeights]
    """One after the other, of equal shapes. The weights of one are valid until the next one is taken."""
    activation: Activation | ClampedSwiglu
    inter: int
    """Intermediate channels of an expert on this rank."""
    dtype: torch.dtype

    @property
    def num_experts(self) -> int:
        return len(self.router.weight)

    def peeked(self) -> tuple[ExpertWeights, ExpertsWeights]:
        """The first expert, and the weights with it as if it had not been taken."""
        experts = iter(self.experts)
        first = next(experts)
        return first, replace(self, experts=itertools.chain((first,), experts))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpertWeights:
    """An expert that all tokens have."""

    gate_up: LinearWeights
    down: LinearWeights
    activation: Activation
    gate: LinearWeights | None
    """[1, hidden]: the result is multiplied by the sigmoid of it; None: the result stays as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureWeights:
    """The second half of a layer with experts."""

    norm: NormWeights | None
    """[hidden]; None: the half reads the residual as it is."""
    experts: ExpertsWeights
    shared: SharedExpertWeights | None
