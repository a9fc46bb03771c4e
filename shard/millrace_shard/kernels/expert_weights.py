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
    SPARSEMIXER = "sparsemixer"
    """Two experts, one after the other: each share is a softmax over the experts that come near the best one left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """The choice of a token's experts, and their shares. Of equal experts the first is chosen."""

    top_k: int
    """Experts of a token."""
    scoring: Scoring
    renormalise: bool = False
    """Whether shares are divided by their sum."""
    num_groups: int = 1
    """Groups of neighbouring experts, of which the best are kept."""
    group_members: int = 2
    """A group counts by the sum of as many of its best experts: 2, or 1, which softmax needs."""
    top_groups: int = 1
    """Groups that are kept."""
    scale: float = 1.0
    """A factor of all shares."""
    jitter: float = 0.0
    """For sparsemixer: half of the relative distance from the best logit within which others count."""

    def choose(self, logits: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The chosen experts [T, top_k] int64, best first, and their shares [T, top_k] float32.

        `logits` is [T, E] float32, and `correction` [E] float32 is for sigmoids and for softmax over all experts.
        """
        if self.scoring is Scoring.SPARSEMIXER:
            return _sparsemixer(logits, self.jitter)
        if self.scoring is Scoring.SOFTMAX and correction is not None:
            scores = logits.softmax(-1)
            chosen = _best(self._within_groups(scores + correction), self.top_k)
            shares = scores.gather(1, chosen)
        elif self.scoring is not Scoring.SIGMOID:
            chosen = _best(self._within_groups(logits), self.top_k)
            if self.scoring is Scoring.SOFTMAX:
                shares = logits.softmax(-1).gather(1, chosen)
            else:
                shares = logits.gather(1, chosen).softmax(-1)
        else:
            scores = _sigmoid(logits)
            ranked = scores if correction is None else scores + correction
            chosen = _best(self._within_groups(ranked), self.top_k)
            shares = scores.gather(1, chosen)
        if self.renormalise:
            total = shares[:, 0]
            for rank in range(1, self.top_k):
                total = total + shares[:, rank]
            shares = shares / (total + TINY).unsqueeze(1)
        return chosen, shares if self.scale == 1 else shares * self.scale

    def _within_groups(self, ranked: Tensor) -> Tensor:
        """`ranked` [T, E] with minus infinity outside the best groups."""
        if self.num_groups == 1:
            return ranked
        groups = ranked.view(len(ranked), self.num_groups, -1)
        best = groups.sort(dim=-1, descending=True).values[..., : self.group_members]
        top = _best(best[..., 0] if self.group_members == 1 else best.sum(-1), self.top_groups)
        outside = torch.ones(groups.shape[:2], dtype=torch.bool, device=ranked.device)
        outside.scatter_(1, top, value=False)
        return groups.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(1)


def _sparsemixer(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """The best two experts [T, 2] int64 of `logits` [T, E] float32, and their shares [T, 2] (arXiv 2409.12136)."""
    chosen = _best(logits, 2)
    left, shares = logits, []
    for expert in torch.split(chosen, 1, dim=1):
        best = logits.gather(1, expert)
        is_far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * jitter
        shares.append(left.masked_fill(is_far, -torch.inf).softmax(-1).gather(1, expert))
        left = left.scatter(1, expert, -torch.inf)
    return chosen, torch.cat(shares, dim=1)


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
    share_factors: Tensor | None = None
    """[E] float32: the shares of an expert are multiplied by its factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """One expert."""

    gate_up: LinearWeights
    """[2 * inter, hidden], gates first; [inter, hidden] without gates. Of a latent, channels count as hidden ones."""
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
    scales_inputs: bool = False
    """Whether an expert's inputs are multiplied by its share, not its results."""
    latent: tuple[LinearWeights, LinearWeights] | None = None
    """[latent, hidden] before the experts, but not the router, and [hidden, latent] after their sum; None: neither."""

    @property
    def is_usual(self) -> bool:
        """Whether kernels with an operator for experts compute these, if they know the activation."""
        router, scoring = self.router, self.router.rule.scoring
        corrects = router.correction is None or scoring is Scoring.SIGMOID
        is_known = scoring is not Scoring.SPARSEMIXER and router.share_factors is None
        has_gate = isinstance(self.activation, ClampedSwiglu) or self.activation.has_gate
        return corrects and is_known and has_gate and not (self.scales_inputs or self.latent)

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
