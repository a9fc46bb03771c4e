"""Torch's own operators in fast mode: what they are given, where they are used, and that each can be turned off."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from millrace_testing.router.pages import Pages, Span

pytest.importorskip("triton", reason="no Triton for this platform")

from millrace_shard.config import ShardConfig
from millrace_shard.kernels.agreement import Random
from millrace_shard.kernels.base import Experts
from millrace_shard.kernels.cuda import grouped_experts
from millrace_shard.kernels.cuda.operators import CudaKernels
from millrace_shard.kernels.expert_weights import RoutingRule, Scoring
from millrace_shard.kernels.experts_agreement import experts_weights

FP16 = torch.float16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Varlen:
    """`torch.nn.attention.varlen.varlen_attn` by its documentation, which has no operator for CPUs."""

    calls: list[tuple[int, int]] = field(default_factory=list)
    """Queries and keys of each."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> Tensor:
        self.calls.append((len(query), len(key)))
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert enable_gqa == (query.shape[1] != key.shape[1])
        ends = [each.tolist() for each in (cu_seq_q, cu_seq_k)]
        assert max_q == max(b - a for a, b in zip(ends[0], ends[0][1:], strict=False))
        assert max_k == max(b - a for a, b in zip(ends[1], ends[1][1:], strict=False))
        rows = []
        for q0, q1, k0, k1 in zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False):
            group = query.shape[1] // key.shape[1]
            keys, values = (
                each[k0:k1].float().repeat_interleave(group, dim=1) for each in (key, value)
            )
            scores = torch.einsum("qhd,khd->hqk", query[q0:q1].float(), keys) * scale
            # The last query is at the last key.
            at = torch.arange(k1 - k0, device=query.device)
            age = at[k1 - k0 - (q1 - q0) :, None] - at
            left, right = window_size
            seen = age >= -right
            if left >= 0:
                seen &= age <= left
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            rows.append(torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype))
        return torch.cat(rows)


CONTEXTS = (70, 33, 40, 9)
SPANS: tuple[Span, ...] = ((1, 32, 33), (0, 0, 70), (3, 8, 9), (2, 25, 40))
"""Single queries among a whole prompt and the end of one."""


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch) -> Varlen:
    fake = Varlen()
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", fake)
    return fake


def pages(*operators: str, contexts: tuple[int, ...] = CONTEXTS) -> Pages:
    kernels = CudaKernels(deterministic=False, operators=operators)
    return Pages.random(kernels, contexts, heads=(4, 2, 16), dtype=FP16, device=DEVICE)


@pytest.mark.parametrize("window", [None, 20])
def test_prompts_are_torchs_and_single_queries_are_not(varlen: Varlen, window: int | None) -> None:
    paged = pages("varlen_attn")
    out = paged.attend(SPANS, window)
    assert float((out.double() - paged.expected(SPANS, window)).abs().max()) < 0.004
    # With a window, only the keys that a query sees are copied.
    assert varlen.calls == [(85, 110 if window is None else 70 + 34)]


def test_what_torchs_attention_lacks_stays_with_our_own(varlen: Varlen) -> None:
    paged = pages("varlen_attn", contexts=(70, 300))
    whole: list[Span] = [(0, 0, 70)]
    paged.attend(whole, softcap=5.0)
    paged.attend(whole, sinks=torch.zeros(4, device=DEVICE))
    # Few queries, and the end of a long prompt.
    paged.attend([(0, 50, 70)])
    paged.attend([(1, 230, 300)])
    assert not varlen.calls
    pages().attend(SPANS)
    assert not varlen.calls
    paged.attend(whole)
    assert varlen.calls == [(70, 70)]


def test_all_layers_of_a_step_share_what_is_planned_for_it(varlen: Varlen) -> None:
    paged = pages("varlen_attn")
    batch = paged.batch(SPANS)
    first, again = (paged.attend_batch(SPANS, batch) for _ in range(2))
    attention = vars(paged.kernels)["_attention"]
    (plan,) = attention._varlen._plans[1].values()
    paged.attend_batch(SPANS, batch, window=20)
    assert attention._varlen._plans[1][None] is plan
    assert torch.equal(first, again)
    assert len(varlen.calls) == 3


RULE = RoutingRule(top_k=3, scoring=Scoring.SOFTMAX)


@pytest.mark.parametrize("rows", [1, 7, 8, 40])
def test_experts_of_many_rows_are_torchs_products(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    sizes: list[tuple[int, ...]] = []

    def counted(x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        sizes.append((*x.shape, weight.shape[2]))
        assert offs[-1] == len(x)
        return grouped_mm(x, weight, offs=offs)

    grouped_mm = torch.nn.functional.grouped_mm
    monkeypatch.setattr("torch.nn.functional.grouped_mm", counted)
    monkeypatch.setattr(grouped_experts, "LEAST_ROWS", 2)

    def made(*operators: str) -> Experts:
        weights = experts_weights(
            Random(torch.bfloat16, DEVICE),
            torch.bfloat16,
            RULE,
            hidden=48,
            inter=32,
            num_experts=12,
        )
        return CudaKernels(deterministic=False, operators=operators).experts(weights)

    x = torch.randn(rows, 48, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    own, theirs = made()(x).float(), made("grouped_mm")(x).float()
    assert ((own - theirs).abs() / (1 + own.abs())).max() < 0.05
    # From two rows of an expert on: 8 rows have 24 pairs for 12 experts.
    assert sizes == ([(3 * rows, 48, 64), (3 * rows, 32, 48)] if rows >= 8 else [])


def test_operators_that_the_flag_names_are_read() -> None:
    config = ShardConfig.from_args(["model", "--disable-operators=varlen_attn, grouped_mm"])
    assert config.disable_operators == ("varlen_attn", "grouped_mm")
    assert ShardConfig.from_args(["model"]).disable_operators == ()
