"""The operator of experts against its definition in float64, and a row's bits among other rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from millrace_shard.kernels.agreement import Random
from millrace_shard.kernels.base import Experts
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.cpu.tile_experts import TiledExperts
from millrace_shard.kernels.expert_weights import ExpertsWeights, RoutingRule, Scoring
from millrace_shard.kernels.experts_agreement import RULES, experts_weights
from millrace_shard.kernels.layer_blocks import ComposedExperts
from millrace_shard.kernels.layer_weights import Activation
from millrace_shard.kernels.plain import PlainKernels
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.quantized.code_formats import defined_experts

BF16 = torch.bfloat16
CPU = torch.device("cpu")
SHAPES = {"in-tiles": (64, 96, 12), "odd": (96, 48, 12), "long": (832, 816, 6)}
"""Hidden, intermediate and the number of experts; sums over 26 steps of 32 inputs are taken in parts."""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def kernels() -> CpuKernels:
    made = make_kernels("cpu", deterministic=True)
    assert isinstance(made, CpuKernels)
    return made


def weights_of(rule: RoutingRule, shape: str) -> ExpertsWeights:
    hidden, inter, count = SHAPES[shape]
    random = Random(BF16, CPU)
    return experts_weights(random, BF16, rule, hidden=hidden, inter=inter, num_experts=count)


def rows_of(count: int, shape: str, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, SHAPES[shape][0], generator=generator).to(BF16)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.scoring.value)
def test_experts_match_their_definition(kernels: CpuKernels, rule: RoutingRule, shape: str) -> None:
    made = kernels.experts(weights_of(rule, shape))
    assert isinstance(made, TiledExperts)
    for count in (1, 5, 200):
        x = rows_of(count, shape)
        expected = defined_experts(weights_of(rule, shape), x)
        error = (made(x).double() - expected).abs() / (1 + expected.abs())
        assert error.max() < 0.015


def steps_of(experts: Experts, x: Tensor, shape: str) -> Iterator[Tensor]:
    """The results of `x` alone, one row after the other, and between other rows that many experts have."""
    yield experts(x)
    yield torch.cat([experts(row) for row in torch.split(x, 1)])
    others = rows_of(300, shape, seed=2)
    yield experts(torch.cat((others[:7], x, others)))[7 : 7 + len(x)]
    crowd = x[:1].expand(90, -1)
    yield experts(torch.cat((crowd, x)))[90:]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.scoring.value)
def test_a_row_has_the_same_bits_with_any_other_rows_and_on_any_threads(
    kernels: CpuKernels, rule: RoutingRule, shape: str
) -> None:
    made, x = kernels.experts(weights_of(rule, shape)), rows_of(9, shape)
    expected = made(x)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for result in steps_of(made, x, shape):
            assert torch.equal(result, expected)


def test_more_pairs_than_are_computed_at_once_have_the_same_bits(kernels: CpuKernels) -> None:
    rule, shape = RULES[0], "in-tiles"
    made, x = kernels.experts(weights_of(rule, shape)), rows_of(2500, shape)
    assert torch.equal(made(x)[1000:1400], made(x[1000:1400]))


def test_a_row_that_is_not_finite_fails_no_other_row(kernels: CpuKernels) -> None:
    for rule in RULES:
        made, x = kernels.experts(weights_of(rule, "in-tiles")), rows_of(20, "in-tiles")
        before = made(x)
        x[3, 5], x[9, 60] = math.nan, math.inf
        after = made(x)
        assert after[[3, 9]].isnan().all()
        kept = [row for row in range(20) if row not in {3, 9}]
        assert torch.equal(after[kept], before[kept])


def test_experts_accept_no_rows(kernels: CpuKernels) -> None:
    assert kernels.experts(weights_of(RULES[0], "in-tiles"))(rows_of(0, "in-tiles")).shape == (
        0,
        64,
    )


def test_equal_experts_are_chosen_in_order(kernels: CpuKernels) -> None:
    """A router of zeros scores all experts alike, so the first experts are added."""
    rule = RoutingRule(top_k=2, scoring=Scoring.SOFTMAX, renormalise=True)
    weights = partial(weights_of, rule, "in-tiles")
    zeros = replace(weights().router, weight=torch.zeros_like(weights().router.weight))
    x = rows_of(3, "in-tiles")
    plain = ComposedExperts(PlainKernels(deterministic=True), replace(weights(), router=zeros))(x)
    made = kernels.experts(replace(weights(), router=zeros))(x)
    torch.testing.assert_close(made.float(), plain.float(), atol=0.02, rtol=0.02)


def test_experts_that_do_not_fit_the_tiles_are_composed(kernels: CpuKernels) -> None:
    weights = partial(experts_weights, Random(BF16, CPU), BF16, RULES[0], num_experts=4)
    for made in (
        kernels.experts(weights(hidden=48, inter=32)),
        kernels.experts(weights(hidden=64, inter=40)),
        kernels.experts(replace(weights(hidden=64, inter=32), activation=Activation.GELU_TANH)),
    ):
        assert isinstance(made, ComposedExperts)
