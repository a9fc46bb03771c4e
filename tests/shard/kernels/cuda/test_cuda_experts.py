"""The Triton experts against plain torch and against themselves: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="no Triton for this platform")

from millrace_shard.kernels.agreement import Random
from millrace_shard.kernels.cuda.grouped_experts import GroupedExperts
from millrace_shard.kernels.cuda.operators import CudaKernels
from millrace_shard.kernels.cuda.triton_choice import group_pairs
from millrace_shard.kernels.expert_weights import RoutingRule, Scoring
from millrace_shard.kernels.experts_agreement import RULES, experts_weights
from millrace_shard.kernels.layer_blocks import ComposedExperts
from millrace_shard.kernels.plain import PlainKernels

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# The interpreter casts to bfloat16 by cutting off, as numpy has none.
TOLERANCE = {BF16: 0.05, FP16: 0.004, FP32: 2e-5}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def experts_of(rule: RoutingRule, dtype: torch.dtype, *, composed: bool = False) -> object:
    weights = partial(
        experts_weights, Random(dtype, DEVICE), dtype, rule, hidden=40, inter=24, num_experts=12
    )
    if composed:
        return ComposedExperts(PlainKernels(deterministic=True), weights())
    return CudaKernels(deterministic=True).experts(weights())


def rows_of(count: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 40, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.scoring.value)
def test_experts_match_plain_torch(rule: RoutingRule, dtype: torch.dtype) -> None:
    made, plain = experts_of(rule, dtype), experts_of(rule, dtype, composed=True)
    assert isinstance(made, GroupedExperts)
    assert isinstance(plain, ComposedExperts)
    for count in (1, 19):
        x = rows_of(count, dtype)
        difference = (made(x).float() - plain(x).float()).abs() / (1 + plain(x).float().abs())
        assert difference.max() < TOLERANCE[dtype]
    assert made(rows_of(0, dtype)).shape == (0, 40)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.scoring.value)
def test_a_row_has_the_same_bits_beside_any_rows(rule: RoutingRule) -> None:
    made, x = experts_of(rule, FP32), rows_of(5, FP32)
    assert isinstance(made, GroupedExperts)
    expected = made(x)
    assert torch.equal(torch.cat([made(row) for row in torch.split(x, 1)]), expected)
    crowd = x[:1].expand(30, -1)
    assert torch.equal(made(torch.cat((crowd, x, rows_of(9, FP32, seed=2))))[30:35], expected)


@pytest.mark.parametrize(
    "rule",
    [
        *RULES,
        RoutingRule(top_k=3, scoring=Scoring.SOFTMAX),
        RoutingRule(top_k=2, scoring=Scoring.SIGMOID),
    ],
    ids=str,
)
def test_the_choice_is_that_of_plain_torch(rule: RoutingRule) -> None:
    made = experts_of(rule, FP32)
    assert isinstance(made, GroupedExperts)
    logits = Random(FP32, DEVICE)(40, 12)
    logits[7] = 0.5
    bias, correction = made._router.bias, made._router.correction
    biased = logits if bias is None else logits + bias
    chosen, shares = rule.choose(biased, correction)
    result, found_shares = made._choose(logits)
    assert torch.equal(result.long(), chosen)
    torch.testing.assert_close(found_shares, shares)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_row_that_is_not_finite_fails_alone() -> None:
    for rule in RULES:
        made, x = experts_of(rule, FP32), rows_of(4, FP32)
        assert isinstance(made, GroupedExperts)
        before = made(x)
        x[2, 5] = torch.nan
        after = made(x)
        assert after[2].isnan().all()
        assert torch.equal(after[[0, 1, 3]], before[[0, 1, 3]])


def test_pairs_are_ordered_by_expert() -> None:
    chosen = torch.randint(0, 5, (1300, 2), generator=torch.Generator().manual_seed(0))
    chosen[chosen == 3] = 4
    order = torch.empty(2600, dtype=torch.int32, device=DEVICE)
    starts = torch.empty(6, dtype=torch.int32, device=DEVICE)
    group_pairs[(5,)](order, starts, chosen.int().to(DEVICE), 2600)
    assert torch.equal(order.cpu().long(), chosen.flatten().argsort(stable=True))
    counts = chosen.flatten().bincount(minlength=5)
    assert starts.tolist() == [0, *counts.cumsum(0).tolist()]
