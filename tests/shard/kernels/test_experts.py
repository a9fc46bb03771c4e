"""The choice of experts against its definition, one token at a time, and against transformers' routers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from millrace_shard.kernels.expert_weights import RoutingRule, Scoring

NUM_EXPERTS = 12
RULES = {
    "softmax": RoutingRule(top_k=3, scoring=Scoring.SOFTMAX),
    "softmax-renormalised": RoutingRule(top_k=3, scoring=Scoring.SOFTMAX, renormalise=True),
    "softmax-of-chosen": RoutingRule(top_k=4, scoring=Scoring.SOFTMAX_OF_CHOSEN),
    "sigmoid": RoutingRule(top_k=2, scoring=Scoring.SIGMOID, scale=1.7),
    "groups": RoutingRule(
        top_k=4,
        scoring=Scoring.SIGMOID,
        renormalise=True,
        num_groups=4,
        top_groups=2,
        scale=2.5,
    ),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def defined(rule: RoutingRule, logits: list[float], correction: list[float]) -> dict[int, float]:
    """The shares of the chosen experts, best first, in Python's numbers."""
    experts = range(len(logits))
    if rule.scoring is Scoring.SIGMOID:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
        ranked = [score + added for score, added in zip(scores, correction, strict=True)]
        size = len(logits) // rule.num_groups
        worth = {
            group: sum(sorted(ranked[group * size : (group + 1) * size])[-2:])
            for group in range(rule.num_groups)
        }
        kept = sorted(worth, key=lambda group: -worth[group])[: rule.top_groups]
        candidates = [e for e in experts if e // size in kept]
    else:
        candidates = list(experts)
        total = sum(map(math.exp, logits))
        scores = [math.exp(x) / total for x in logits]
        corrected = [score + added for score, added in zip(scores, correction, strict=True)]
        ranked = corrected if rule.scoring is Scoring.SOFTMAX else logits
    chosen = sorted(candidates, key=lambda e: (-ranked[e], e))[: rule.top_k]
    shares = [scores[e] for e in chosen]
    if rule.renormalise or rule.scoring is Scoring.SOFTMAX_OF_CHOSEN:
        shares = [share / sum(shares) for share in shares]
    return {e: share * rule.scale for e, share in zip(chosen, shares, strict=True)}


@pytest.mark.parametrize("name", RULES)
def test_the_choice_and_the_shares_match_their_definitions(name: str) -> None:
    rule, logits, correction = RULES[name], random(50, NUM_EXPERTS), random(NUM_EXPERTS, seed=1)
    chosen, shares = rule.choose(logits, correction)
    for row, experts, result in zip(logits.tolist(), chosen.tolist(), shares, strict=True):
        expected = defined(rule, row, correction.tolist())
        assert experts == list(expected)
        torch.testing.assert_close(result, torch.tensor(list(expected.values())))


@pytest.mark.parametrize("name", RULES)
def test_of_equal_experts_the_first_is_chosen(name: str) -> None:
    rule = RULES[name]
    chosen, shares = rule.choose(torch.zeros(3, NUM_EXPERTS), torch.zeros(NUM_EXPERTS))
    assert chosen.tolist() == [list(range(rule.top_k))] * 3
    assert (shares == shares[:, :1]).all()


@pytest.mark.parametrize("name", RULES)
def test_a_row_has_the_same_choice_and_shares_in_any_batch(name: str) -> None:
    rule, logits, correction = RULES[name], random(133, NUM_EXPERTS), random(NUM_EXPERTS, seed=1)
    chosen, shares = rule.choose(logits, correction)
    for row in range(0, len(logits), 7):
        alone, own = rule.choose(logits[row : row + 1], correction)
        assert torch.equal(alone[0], chosen[row])
        assert torch.equal(own[0], shares[row])


def test_groups_match_transformers() -> None:
    config = AutoConfig.for_model(
        "glm4_moe",
        hidden_size=16,
        n_routed_experts=NUM_EXPERTS,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=4,
        routed_scaling_factor=2.5,
    )
    router = Glm4MoeTopkRouter(config)
    router.weight.data = random(NUM_EXPERTS, 16)
    router.e_score_correction_bias.copy_(random(NUM_EXPERTS, seed=1))
    logits, weights, indexes = router(random(40, 16, seed=2))
    chosen, shares = RULES["groups"].choose(logits, router.e_score_correction_bias)
    order = weights.argsort(dim=1), shares.argsort(dim=1)
    assert torch.equal(indexes.gather(1, order[0]), chosen.gather(1, order[1]))
    torch.testing.assert_close(weights.gather(1, order[0]), shares.gather(1, order[1]))


def test_a_row_that_is_not_finite_chooses_experts_that_exist_and_has_no_finite_share() -> None:
    logits = random(3, NUM_EXPERTS)
    logits[1] = math.nan
    for rule in RULES.values():
        chosen, shares = replace(rule, scale=1.0).choose(logits, torch.zeros(NUM_EXPERTS))
        assert chosen.min() >= 0
        assert chosen.max() < NUM_EXPERTS
        assert shares[1].isnan().all()
        assert shares[[0, 2]].isfinite().all()
