"""A small case of the agreement check for kernels that have their own experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.expert_weights import (
    ExpertsWeights,
    ExpertWeights,
    RouterWeights,
    RoutingRule,
    Scoring,
)
from millrace_shard.kernels.layer_weights import Activation, ClampedSwiglu, LinearWeights
from millrace_shard.kernels.quantized import CodeFormat
from millrace_shard.kernels.stored_weight import StoredWeight

NUM_EXPERTS = 12
HIDDEN = 96
INTER = 816
"""Long enough for sums that are taken in parts."""
ROWS = (1, 3, 150)
"""Enough for experts of more than 32 rows."""
RULES = (
    RoutingRule(top_k=4, scoring=Scoring.SOFTMAX, renormalise=True),
    RoutingRule(top_k=3, scoring=Scoring.SOFTMAX_OF_CHOSEN),
    RoutingRule(
        top_k=4,
        scoring=Scoring.SIGMOID,
        renormalise=True,
        num_groups=3,
        top_groups=2,
        scale=2.5,
    ),
    RoutingRule(
        top_k=4, scoring=Scoring.SOFTMAX, num_groups=3, top_groups=2, group_members=1, scale=2.5
    ),
)
Random = Callable[..., Tensor]
Formats = tuple[CodeFormat | None, CodeFormat | None]
"""Of gates and ups, and of down; None: weights in the model's dtype."""


def outputs(kernels: Kernels, random: Random, dtype: torch.dtype) -> list[Tensor]:
    """The results of experts with every rule, without and with biases and clamped gates."""
    results = []
    for rule in RULES:
        experts = kernels.experts(experts_weights(random, dtype, rule, inter=INTER))
        results += [experts(random(rows, HIDDEN)) for rows in ROWS]
    return results


def experts_weights(
    random: Random,
    dtype: torch.dtype,
    rule: RoutingRule,
    *,
    hidden: int = HIDDEN,
    inter: int = INTER,
    num_experts: int = NUM_EXPERTS,
    formats: Formats = (None, None),
) -> ExpertsWeights:
    """Random weights; experts that are chosen by the softmax of the chosen have biases and clamped gates."""
    is_clamped = rule.scoring is Scoring.SOFTMAX_OF_CHOSEN
    is_sigmoid = rule.scoring is Scoring.SIGMOID

    def linear(outputs: int, inputs: int, of: CodeFormat | None, seed: int) -> LinearWeights:
        weight = StoredWeight.of(random(outputs, inputs) / inputs**0.5)
        if of is not None:
            codes = of.random(outputs, inputs, weight.device, seed)
            weight = replace(weight, parts=(codes,))
        return LinearWeights(weight, random(outputs) / 4 if is_clamped else None)

    def each() -> Iterator[ExpertWeights]:
        for index in range(num_experts):
            gate_up = linear(2 * inter, hidden, formats[0], 2 * index)
            down = linear(hidden, inter, formats[1], 2 * index + 1)
            yield ExpertWeights(gate_up=gate_up, down=down)

    router = RouterWeights(
        weight=random(num_experts, hidden).float() / hidden**0.5,
        bias=random(num_experts).float() / 4 if is_clamped else None,
        correction=random(num_experts).float() / 4 if is_sigmoid else None,
        rule=rule,
    )
    return ExpertsWeights(
        router=router,
        experts=each(),
        activation=ClampedSwiglu(alpha=1.7, limit=1.0) if is_clamped else Activation.SILU,
        inter=inter,
        dtype=dtype,
    )
